"""What is looked at while heads are trained."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_spec.checkpoint import load_heads
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.stages import read_done
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.finetune.watch import HeldOutWatch, held_out_accuracy


class Recorder:
    """Stands for a trainer."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.average = None

    def whole_model(self) -> Any:
        return SimpleNamespace(heads="heads")

    def log_held_out(self, figures: dict[str, float]) -> None:
        self.logged.append(figures)


def test_accuracy_is_that_of_calibration(finished: FinetuneConfig) -> None:
    heads, _ = load_heads(Path(finished.output) / "heads", Target(finished).backbone, dtype=torch.float32)
    found = held_out_accuracy(TrainedHeads(heads, depth_decay=0.8), StateStore(Path(finished.output), "held_out", 3))
    calibration = read_done(Path(finished.output), "calibrate")["result"]
    for top in (1, 5):
        assert [found[f"top{top}_head_{k}"] for k in range(3)] == pytest.approx(calibration[f"top{top}"], abs=1e-4)


def test_it_measures_after_every_epoch_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, recorder = HeldOutWatch(None, None, 4), Recorder()  # type: ignore[arg-type]
    watch.trainer = recorder  # type: ignore[assignment]
    monkeypatch.setattr(watch, "measure", lambda model: {"step": state.global_step})
    for step in range(1, 11):
        state = SimpleNamespace(global_step=step, max_steps=10)
        watch.on_step_end(None, state, SimpleNamespace(should_log=False, should_save=False))
    assert [entry["step"] for entry in recorder.logged] == [4, 8, 10]


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("log", [False, True])
def test_a_line_of_the_log_ends_with_every_checkpoint(log: bool, save: bool) -> None:
    watch = HeldOutWatch(None, None, 4)  # type: ignore[arg-type]
    control = SimpleNamespace(should_log=log, should_save=save)
    watch.on_step_end(None, SimpleNamespace(global_step=1, max_steps=9), control)
    assert control.should_log == (log or save)
