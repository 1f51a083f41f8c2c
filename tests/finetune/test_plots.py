"""Plots of a run."""

import importlib.util
import json
from pathlib import Path

import pytest

from medusa_spec.finetune import plots
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.plots import draw_plots


def test_plots_are_images_of_the_figures(finished: FinetuneConfig, tmp_path: Path) -> None:
    figures = json.loads((Path(finished.output) / "report" / "report.json").read_text())
    names = draw_plots(figures, tmp_path)
    assert names == ["loss.png", "accuracy.png", "trees.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_without_history_there_is_no_curve(finished: FinetuneConfig, tmp_path: Path) -> None:
    figures = json.loads((Path(finished.output) / "report" / "report.json").read_text())
    assert draw_plots(figures | {"history": []}, tmp_path) == ["trees.png"]


def test_steps_that_were_not_trained_have_no_loss_to_draw(finished: FinetuneConfig, tmp_path: Path) -> None:
    figures = json.loads((Path(finished.output) / "report" / "report.json").read_text())
    last = len(figures["calibration"]["top1"]) - 1
    for number, entry in enumerate(figures["history"]):  # one step from the middle on, one never
        entry.pop(f"loss_head_{last}", None)
        if number < len(figures["history"]) // 2:
            entry.pop("loss_head_1", None)
    assert draw_plots(figures, tmp_path)[0] == "loss.png"


def test_without_matplotlib_there_are_no_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.util.find_spec("matplotlib") is not None
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert draw_plots({}, tmp_path) == [] and list(tmp_path.iterdir()) == []
