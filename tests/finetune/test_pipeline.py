"""All stages together."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_spec.checkpoint import WEIGHTS_NAME, load_heads
from medusa_spec.errors import ConfigError
from medusa_spec.finetune import FinetuneConfig, run_pipeline
from medusa_spec.finetune.pipeline import STAGES
from medusa_spec.finetune.target import Target
from medusa_spec.unfinished import alone

MakeConfig = Callable[..., FinetuneConfig]


def weights(config: FinetuneConfig) -> bytes:
    return (Path(config.output) / "heads" / WEIGHTS_NAME).read_bytes()


def test_all_stages_leave_heads_that_load(finished: FinetuneConfig) -> None:
    output = Path(finished.output)
    for stage in ("data", "states", "train", "calibrate", "report"):
        assert (output / f"{stage}.done.json").exists()
    heads, config = load_heads(output / "heads", Target(finished).backbone)
    assert config.tree is not None and len(config.tree.paths) == 7
    assert config.values is not None and config.values.depth == 3
    assert any(float(p.abs().max()) > 0 for p in heads.parameters())
    assert "CC0-1.0" in (output / "heads" / "README.md").read_text()


def test_a_finished_run_is_left_as_it_is(finished: FinetuneConfig) -> None:
    before = {path: path.stat().st_mtime_ns for path in Path(finished.output).rglob("*") if path.is_file()}
    run_pipeline(finished)
    after = {path: path.stat().st_mtime_ns for path in Path(finished.output).rglob("*") if path.is_file()}
    assert before == after


def test_a_changed_setting_is_refused_and_named(finished: FinetuneConfig) -> None:
    with pytest.raises(ConfigError, match=r"'train'.*num_heads was 3, is 2.*redo"):
        run_pipeline(replace(finished, num_heads=2))
    with pytest.raises(ConfigError, match=r"'states'.*batch_tokens was 1024, is 512.*redo"):
        run_pipeline(replace(finished, batch_tokens=512))
    with pytest.raises(ConfigError, match=r"'train'.*learning_rate was 0.001, is 0.01"):
        run_pipeline(replace(finished, learning_rate=0.01))


def test_redo_starts_afresh_from_a_stage_on(finished: FinetuneConfig, tmp_path: Path) -> None:
    shutil.copytree(finished.output, tmp_path / "run")
    config = replace(finished, output=str(tmp_path / "run"), learning_rate=0.01)
    run_pipeline(config, stages=("train", "calibrate"), redo="train")
    assert weights(config) != weights(finished)
    assert not (tmp_path / "run" / "report.done.json").exists()


def test_an_unknown_stage_is_refused_by_name(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bake"):
        run_pipeline(make_config(tmp_path), stages=("bake",))


def test_the_target_is_untouched(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path, epochs=1)
    target = Target(config)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    run_pipeline(config, stages=("data", "states", "train", "calibrate"), target=target)
    after = target.release().state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())


# What must be on disk before the kill, so that it hits the stage in its middle.
MIDDLE = {
    "data": "data.begun.json",
    "states": "states/train-00001.safetensors",
    "train": "train/checkpoint-4/complete",
    "calibrate": "calibrate.begun.json",
    "report": "report.begun.json",
}


@pytest.mark.parametrize("stage", MIDDLE)
def test_killed_at_any_stage_and_restarted_gives_the_same_heads(
    stage: str, finished: FinetuneConfig, tmp_path: Path
) -> None:
    config = replace(finished, output=str(tmp_path / "run"))
    Path(config.output).mkdir()
    earlier = list(STAGES)[: list(STAGES).index(stage)]
    for name in earlier:  # stages before the killed one are taken over from the whole run
        for path in Path(finished.output).glob(f"{name}*"):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, Path(config.output) / path.name)
    if stage == "report":
        shutil.copytree(Path(finished.output) / "heads", Path(config.output) / "heads")
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(config.to_dict()))
    kill_when(Path(config.output) / MIDDLE[stage], settings)
    assert not (Path(config.output) / f"{stage}.done.json").exists()
    run_pipeline(config, stages=("data", "states", "train", "calibrate") + (("report",) if stage == "report" else ()))
    assert weights(config) == weights(finished)
    # Most kills here hit a file that was just being written.
    assert not [path for path in Path(config.output).rglob("*") if path.name.startswith(".")]


def kill_when(sign: Path, settings: Path) -> None:
    """Runs the pipeline in a process of its own and kills it with signal 9 as soon as `sign` is there."""
    # The process waits once at the sign, so that the kill cannot come too late.
    script = f"""
import json, os, time, pathlib
real = os.replace
def replace(a, b):
    real(a, b)
    if str(b) == {str(sign)!r}: time.sleep(600)
os.replace = replace
touch = pathlib.Path.touch
def stop(self, *a, **k):
    touch(self, *a, **k)
    if str(self) == {str(sign)!r}: time.sleep(600)
pathlib.Path.touch = stop
from medusa_spec.finetune import FinetuneConfig, run_pipeline
run_pipeline(FinetuneConfig.from_dict(json.load(open({str(settings)!r}))))
"""
    process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while not sign.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert sign.exists() and process.poll() is None
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_a_stage_alone_checks_that_those_before_it_had_these_settings(finished: FinetuneConfig, tmp_path: Path) -> None:
    """Otherwise prompts that were trained on would be reported as held out."""
    shutil.copytree(finished.output, tmp_path / "run")
    config = replace(finished, output=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"'data'.*held_out was 0.1, is 0.5"):
        run_pipeline(replace(config, held_out=0.5), stages=("report",), redo="report")
    with pytest.raises(ConfigError, match=r"'states'.*batch_tokens was 1024, is 512"):
        run_pipeline(replace(config, batch_tokens=512), stages=("train",))
    run_pipeline(replace(config, report_prompts=2), stages=("report",), redo="report")


def test_what_is_done_again_must_be_run(finished: FinetuneConfig) -> None:
    with pytest.raises(ConfigError, match=r"redo must be one of the stages that are run, report, got 'train'"):
        run_pipeline(finished, stages=("report",), redo="train")
    assert (Path(finished.output) / "train.done.json").exists()


def test_a_redo_that_was_stopped_goes_on(
    finished: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished.output, tmp_path / "run")
    config = replace(finished, output=str(tmp_path / "run"), epochs=1)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    again: dict[str, Any] = {"stages": ("train", "calibrate"), "redo": "train"}
    with monkeypatch.context() as patch:
        patch.setitem(STAGES, "calibrate", stop)
        with pytest.raises(KeyboardInterrupt):
            run_pipeline(config, **again)
    assert not (tmp_path / "run" / "heads").exists() and not (tmp_path / "run" / "report.done.json").exists()
    trained = (tmp_path / "run" / "train.done.json").stat().st_mtime_ns
    run_pipeline(config, **again)
    assert (tmp_path / "run" / "train.done.json").stat().st_mtime_ns == trained
    assert (tmp_path / "run" / "heads").exists()
    with monkeypatch.context() as patch:
        patch.setitem(STAGES, "calibrate", stop)
        with pytest.raises(KeyboardInterrupt):
            run_pipeline(replace(config, report_prompts=3), **again)
    run_pipeline(replace(config, report_prompts=3))  # a command that says nothing of it does the rest
    trained = (tmp_path / "run" / "train.done.json").stat().st_mtime_ns
    run_pipeline(config, **again)  # and one that was not stopped begins again
    assert (tmp_path / "run" / "train.done.json").stat().st_mtime_ns > trained


def test_a_second_process_in_the_same_folder_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path / "run")
    (tmp_path / "run").mkdir()
    with alone(tmp_path / "run") as first, pytest.raises(ConfigError, match="no other process runs its stages"):
        assert first
        run_pipeline(config, stages=("data",))
    run_pipeline(config, stages=("data",))


def test_reading_from_the_end_is_for_states_alone(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path / "run")
    back = replace(config, reverse=True)
    with pytest.raises(ConfigError, match="stage 'data' must be finished first"):
        run_pipeline(back)
    run_pipeline(config, stages=("data",))
    with pytest.raises(ConfigError, match="reverse must be False but for the stage states alone"):
        run_pipeline(back, stages=("states", "train"))
    with alone(tmp_path / "run"):  # the first process
        run_pipeline(back)
    assert (tmp_path / "run" / "states.done.json").exists() and not (tmp_path / "run" / "train").exists()
