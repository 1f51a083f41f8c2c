import json
import subprocess
from pathlib import Path

import pytest
import torch

from medusa_spec import machine
from medusa_spec.machine import LoadWatch, git_revision, machine_facts, peak_memory_mib, quiet_words


def test_facts_name_versions_threads_device_and_can_be_json() -> None:
    facts = machine_facts(torch.device("cpu"), torch.bfloat16)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert (facts["device"], facts["dtype"]) == ("cpu", "bfloat16")
    json.dumps(facts)


class _Clock:
    """Seconds of the wall, of this process's work, and of all cores' work, as the test sets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.own = self.busy = 0.0
        monkeypatch.setattr(machine.time, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(machine.time, "process_time", lambda: self.own)
        monkeypatch.setattr(machine, "_busy_seconds", lambda: self.busy)


def test_own_work_is_not_counted_as_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    watch = LoadWatch()
    clock.wall, clock.own, clock.busy = 10.0, 15.0, 15.0  # two threads of ours, and nobody else
    assert watch.others() == 0


def test_others_work_is_counted_in_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    watch = LoadWatch()
    clock.wall, clock.own, clock.busy = 10.0, 5.0, 25.0  # two other programs that never rest
    assert watch.others() == pytest.approx(2)


def test_the_system_counts_busy_seconds_or_says_that_it_does_not() -> None:
    before = machine._busy_seconds()
    sum(range(10**6))
    after = machine._busy_seconds()
    assert (before is None and after is None) or after >= before > 0


def test_noise_is_said_loudly_and_quiet_quietly() -> None:
    assert "NOT QUIET" in quiet_words(1.0)
    assert "NOT QUIET" not in quiet_words(0.01)
    assert "unknown" in quiet_words(None)


def test_revision_is_that_of_a_tracked_package_only(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    (tmp_path / "__init__.py").write_text("")
    assert git_revision(tmp_path) is None
    git("init", "--quiet")
    assert git_revision(tmp_path) is None
    git("add", "__init__.py")
    git("commit", "--quiet", "--message", "first")
    revision = git("rev-parse", "HEAD")[:12]
    assert git_revision(tmp_path) == revision
    (tmp_path / "__init__.py").write_text("changed = True")
    assert git_revision(tmp_path) == f"{revision}-dirty"


def test_peak_memory_is_more_than_a_large_tensor_held() -> None:
    held = torch.ones(64 * 2**18)  # 64 MiB
    peak = peak_memory_mib(torch.device("cpu"))
    assert peak is not None and 64 < peak < 2**20
    assert held[0] == 1
