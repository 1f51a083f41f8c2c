"""All stages in one output folder, each skipped when it is done."""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from medusa_spec.errors import ConfigError
from medusa_spec.files import read_json, write_json
from medusa_spec.finetune import stages as marks
from medusa_spec.finetune.calibrate import run_calibrate
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data import run_data
from medusa_spec.finetune.distil import run_distil
from medusa_spec.finetune.joint import run_joint
from medusa_spec.finetune.processes import join
from medusa_spec.finetune.report import run_report
from medusa_spec.finetune.selfdata import run_self
from medusa_spec.finetune.states import run_states
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.teacher import run_teacher
from medusa_spec.finetune.train import run_train
from medusa_spec.finetune.trainer import check_trackers
from medusa_spec.unfinished import alone, remove_unfinished

STAGES: dict[str, Callable[[FinetuneConfig, Target], Any]] = {
    "self": run_self,
    "distil": run_distil,
    "data": run_data,
    "states": run_states,
    "teacher": run_teacher,
    "train": run_train,
    "joint": run_joint,
    "calibrate": run_calibrate,
    "report": run_report,
}
"""The stages in their order."""

MEDUSA_1 = ("states", "teacher", "train")
"""Those that train heads on the target as it is, which are passed by where trained ones are given to joint training."""

REDO = "redo.begun.json"
"""Says that what is to be done again has been deleted; there until it has been done again."""

SHARED = ("states", "train", "joint")
"""Stages that the processes of a launcher do together; the others are done by one while the rest wait."""


def run_pipeline(
    config: FinetuneConfig,
    *,
    stages: Sequence[str] | None = None,
    redo: str | None = None,
    target: Target | None = None,
) -> Path:
    """Runs the stages that are not done, under `accelerate launch` on all its processes.

    Args:
        config: All settings.
        stages: Names of the stages to run; None runs all.
        redo: Stage from which on everything is deleted and run again.
        target: The loaded target, to save loading it; None loads `config.model` when a stage needs it.

    Returns:
        The output folder.

    Raises:
        ConfigError: If a stage is unknown, or it or one before it was run with other settings, or a tracker is not
            installed, or another process is at work in the folder.
    """
    chosen = _chosen(config, stages, redo)
    check_trackers(config)
    processes = join(config.device)
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    with alone(output) if processes.main and not config.reverse else nullcontext(True) as nobody_else:
        if not nobody_else:
            raise ConfigError(f"output must be a folder in which no other process runs its stages, got {output}")
        if processes.main and not config.reverse:
            remove_unfinished(output)  # of a run that was killed
            if redo is not None:
                _redo(output, redo, {"settings": config.to_dict(), "stages": chosen})
        processes.wait()
        target = target or Target(config)
        for name in _in_turn(output, chosen):
            if config.joint_alone and name in MEDUSA_1:
                continue
            if processes.main or name in SHARED:
                STAGES[name](config, target)
            processes.wait()
        if processes.main and not config.reverse:
            _forget_redo(output, chosen)
    return output


def _chosen(config: FinetuneConfig, stages: Sequence[str] | None, redo: str | None) -> list[str]:
    """The stages to run, in their order.

    Raises:
        ConfigError: If one is unknown, or does not go with the other settings.
    """
    for name in (*(stages or ()), *([redo] if redo else ())):
        if name not in STAGES:
            raise ConfigError(f"stages must be among {', '.join(STAGES)}, got {name!r}")
    chosen = [name for name in STAGES if stages is None or name in stages]
    if redo is not None and redo not in chosen:
        raise ConfigError(
            f"redo must be one of the stages that are run, {', '.join(chosen)}, got {redo!r}: it deletes what the "
            "later ones left"
        )
    if not config.reverse:
        return chosen
    if redo is not None or "states" not in chosen or (stages is not None and len(chosen) > 1):
        raise ConfigError(
            f"reverse must be False but for the stage states alone, got stages {', '.join(chosen)} and redo {redo}: it "
            "is for a second process beside one that runs them all"
        )
    marks.read_done(Path(config.output), "data")
    return ["states"]


def _in_turn(output: Path, chosen: Sequence[str]) -> list[str]:
    """The chosen stages, and before them those that are done: they only look whether the settings are still theirs."""
    last = max(map(list(STAGES).index, chosen), default=0)
    before = list(STAGES)[:last]
    return [name for name in STAGES if name in chosen or (name in before and marks.done_path(output, name).exists())]


def _redo(output: Path, first: str, asked: dict[str, Any]) -> None:
    """Deletes what a stage and the later ones left, once: a command that was killed and is run again goes on."""
    asked = json.loads(json.dumps(asked | {"redo": first}))
    if (output / REDO).exists() and read_json(output / REDO) == asked:
        return
    for name in list(STAGES)[list(STAGES).index(first) :]:
        marks.forget(output, name)
    write_json(output / REDO, asked)


def _forget_redo(output: Path, run: Sequence[str]) -> None:
    """What was to be done again has been, by whichever command."""
    if (output / REDO).exists() and set(read_json(output / REDO)["stages"]) <= set(run):
        (output / REDO).unlink()
