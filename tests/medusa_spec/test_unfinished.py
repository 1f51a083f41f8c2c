"""What is being written, and what a killed process left of it."""

import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from medusa_spec import unfinished as module
from medusa_spec.unfinished import alone, locked, remove_unfinished, unfinished

WRITER = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[1])
from unfinished import unfinished
with unfinished(pathlib.Path(sys.argv[2])) as folder:
    (folder / "part").write_text("half")
    print(folder, flush=True)
    time.sleep(600)
"""


@contextmanager
def writer(path: Path) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """Another process that is writing `path`, and its folder; killed in the end."""
    command = [sys.executable, "-c", WRITER, str(Path(module.__file__).parent), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_nothing_is_left_in_the_end_whatever_happens(tmp_path: Path) -> None:
    with unfinished(tmp_path / "a") as folder:
        assert folder.parent == tmp_path and folder.name.startswith(".a.")
        (folder / "a").touch()
    with pytest.raises(OSError, match="full"), unfinished(tmp_path / "a"):
        raise OSError("full")
    assert not list(tmp_path.iterdir())


def test_what_a_kill_left_is_removed_and_what_is_being_written_stays(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    with writer(tmp_path / "below" / "a") as (process, folder), unfinished(tmp_path / "b") as own:
        remove_unfinished(tmp_path)
        assert (folder / "part").read_text() == "half" and own.exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (folder / "part").exists()
        remove_unfinished(tmp_path)
        assert not list((tmp_path / "below").iterdir()) and own.exists()


def test_other_hidden_folders_and_files_stay(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "a.unfinished").mkdir()
    (tmp_path / ".b.unfinished").touch()
    remove_unfinished(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    remove_unfinished(tmp_path / "missing")


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, made = module._lock, []

    def late(folder: Path, *, wait: bool) -> int | None:
        made.append(folder)
        if len(made) == 1:
            shutil.rmtree(folder)
        return lock(folder, wait=wait)

    monkeypatch.setattr(module, "_lock", late)
    with unfinished(tmp_path / "a") as folder:
        assert folder.exists() and folder == made[1] != made[0]


def test_without_locks_files_are_written_and_nothing_is_taken_for_a_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    with unfinished(tmp_path / "a") as folder:
        remove_unfinished(tmp_path)
        assert folder.exists()
    assert not list(tmp_path.iterdir())


def test_a_lock_keeps_others_waiting_and_is_given_back(tmp_path: Path) -> None:
    order: list[str] = []

    def other() -> None:
        with locked(tmp_path):
            order.append("other")

    thread = threading.Thread(target=other)
    with pytest.raises(OSError, match="full"), locked(tmp_path):
        thread.start()
        thread.join(0.1)
        order.append("first")
        raise OSError("full")
    thread.join()
    assert order == ["first", "other"]


def test_one_alone_is_told_of_the_other(tmp_path: Path) -> None:
    with alone(tmp_path) as first, alone(tmp_path) as second:
        assert first and not second
    with alone(tmp_path) as again:
        assert again
