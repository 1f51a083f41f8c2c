"""What makes a stage resumable."""

from pathlib import Path

import pytest

from medusa_spec.errors import ConfigError
from medusa_spec.finetune.stages import begin, done_path, finish, forget, read_done, settings_hash


def test_a_stage_is_done_once_finished_with_the_same_settings(tmp_path: Path) -> None:
    settings = {"a": 1, "b": (1, 2)}
    assert begin(tmp_path, "x", settings) is False
    assert begin(tmp_path, "x", settings) is False  # begun, not done: it goes on
    finish(tmp_path, "x", settings, {"found": 3})
    assert begin(tmp_path, "x", settings) is True
    done = read_done(tmp_path, "x")
    assert done["result"] == {"found": 3} and done["hash"] == settings_hash({"a": 1, "b": [1, 2]})


@pytest.mark.parametrize("finished", [False, True])
def test_other_settings_are_refused_whether_begun_or_done(tmp_path: Path, finished: bool) -> None:
    begin(tmp_path, "x", {"a": 1, "b": 2})
    if finished:
        finish(tmp_path, "x", {"a": 1, "b": 2}, {})
    with pytest.raises(ConfigError, match=r"'x'.*: b was 2, is 3; c was None, is 4\. .*redo='x'"):
        begin(tmp_path, "x", {"a": 1, "b": 3, "c": 4})


def test_a_forgotten_stage_starts_afresh(tmp_path: Path) -> None:
    begin(tmp_path, "x", {"a": 1})
    (tmp_path / "x").mkdir()
    finish(tmp_path, "x", {"a": 1}, {})
    forget(tmp_path, "x")
    assert list(tmp_path.iterdir()) == [] and begin(tmp_path, "x", {"a": 2}) is False


def test_a_stage_that_is_not_done_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stage 'data' must be finished first"):
        read_done(tmp_path, "data")
    assert not done_path(tmp_path, "data").exists()


@pytest.mark.parametrize("finished", [False, True])
def test_a_setting_that_an_older_version_did_not_note_is_compared_once_it_is_noted(
    tmp_path: Path, finished: bool
) -> None:
    begin(tmp_path, "x", {"a": 1})
    if finished:
        finish(tmp_path, "x", {"a": 1}, {})
    with pytest.raises(ConfigError, match="b was None, is 2"):
        begin(tmp_path, "x", {"a": 1, "b": 2})
    assert begin(tmp_path, "x", {"a": 1, "b": 2}, younger=("b",)) is finished
    if not finished:  # noted when it went on
        with pytest.raises(ConfigError, match="b was 2, is 3"):
            begin(tmp_path, "x", {"a": 1, "b": 3}, younger=("b",))


def test_what_a_stage_left_elsewhere_is_forgotten_with_it(tmp_path: Path) -> None:
    (tmp_path / "written").mkdir()
    for name in (
        "self.jsonl",
        "distil.jsonl",
        "written/self-0000001.safetensors",
        "written/distil-0000001.safetensors",
    ):
        (tmp_path / name).write_text("")
    (tmp_path / "heads").mkdir()
    forget(tmp_path, "distil")
    assert {path.name for path in tmp_path.rglob("*.*")} == {"self.jsonl", "self-0000001.safetensors"}
    forget(tmp_path, "calibrate")
    assert not (tmp_path / "heads").exists()
