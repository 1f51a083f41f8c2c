"""All stages in one output folder, each skipped when it is done."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from medusa_spec.errors import ConfigError
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
from medusa_spec.unfinished import remove_unfinished

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
        ConfigError: If a stage is unknown, or was run before with other settings, or a tracker is not installed.
    """
    for name in (*(stages or ()), *([redo] if redo else ())):
        if name not in STAGES:
            raise ConfigError(f"stages must be among {', '.join(STAGES)}, got {name!r}")
    check_trackers(config)
    processes = join(config.device)
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    if processes.main:
        remove_unfinished(output)  # of a run that was killed; a second process beside this one may be writing
    if redo is not None and processes.main:
        for name in list(STAGES)[list(STAGES).index(redo) :]:
            marks.forget(output, name)
    processes.wait()
    target = target or Target(config)
    for name, stage in STAGES.items():
        passed = config.joint_alone and name in MEDUSA_1
        if (stages is None or name in stages) and not passed:
            if processes.main or name in SHARED:
                stage(config, target)
            processes.wait()
    return output
