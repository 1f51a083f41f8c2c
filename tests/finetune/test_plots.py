"""Plots of a run."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from medusa_spec.finetune import plots
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.plots import draw_plots

ALL = [f"{name}.png" for name in "loss gradients accuracy ranks decoder acceptance trees".split()]


def test_plots_are_images_of_the_figures(finished: FinetuneConfig, tmp_path: Path) -> None:
    figures = json.loads((Path(finished.output) / "report" / "report.json").read_text())
    names = draw_plots(figures, tmp_path)
    assert names == ALL
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_without_history_there_is_no_curve(finished: FinetuneConfig, tmp_path: Path) -> None:
    figures = json.loads((Path(finished.output) / "report" / "report.json").read_text())
    assert draw_plots(figures | {"history": []}, tmp_path) == ["ranks.png", "acceptance.png", "trees.png"]


def test_runs_of_older_versions_have_the_plots_that_they_had(finished: FinetuneConfig, tmp_path: Path) -> None:
    figures = json.loads((Path(finished.output) / "report" / "report.json").read_text())
    del figures["ranks"], figures["measured"]["accepted_marginal"], figures["measured"]["accepted_conditional"]
    for entry in figures["history"]:
        for name in [name for name in entry if name.startswith(("grad_norm_head", "decoder"))]:
            del entry[name]
    assert draw_plots(figures, tmp_path) == ["loss.png", "accuracy.png", "trees.png"]


class Axes:
    """Stands for axes and keeps what is drawn."""

    def __init__(self) -> None:
        self.lines: list[Any] = []
        self.bars: list[Any] = []

    def plot(self, x: Any, y: Any, *style: Any, label: str = "", **more: Any) -> list["Axes"]:
        self.lines.append((label, list(x), list(y)))
        return [self]

    def bar(self, x: Any, height: Any, width: float, label: str) -> None:
        self.bars.append((label, list(x), list(height)))

    def set(self, **words: Any) -> None:
        """Nothing to keep."""

    def legend(self) -> None:
        """Nothing to keep."""


def test_what_is_drawn_is_what_was_measured(finished: FinetuneConfig) -> None:
    figures = json.loads((Path(finished.output) / "report" / "report.json").read_text())
    axes = Axes()
    assert plots._ranks(axes, figures)
    for head, (label, x, y) in enumerate(axes.lines):
        assert label == f"head {head}" and x == [1, 2, 3, 4]
        assert y[0] == pytest.approx(figures["calibration"]["top1"][head]) and y == sorted(y)
    axes = Axes()
    assert plots._acceptance(axes, figures)
    measured = figures["measured"]
    assert [bar[2] for bar in axes.bars] == [measured["accepted_marginal"], measured["accepted_conditional"]]
    axes = Axes()
    assert plots._decoder(axes, figures) and plots._gradients(axes, figures)
    drawn = {label: y for label, _, y in axes.lines}
    history = figures["history"]
    assert drawn["μ"] == [entry["decoder_mu"] for entry in history if "decoder_mu" in entry]
    assert drawn["head 1"] == [entry["grad_norm_head_1"] for entry in history if "grad_norm_head_1" in entry]


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
