"""Plots of a run, where matplotlib is there. Knows figures, runs nothing."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def draw_plots(figures: dict[str, Any], folder: Path) -> list[str]:
    """Writes the plots as PNG.

    Returns:
        Names of the files; none without matplotlib (`pip install medusa-spec[report]`).
    """
    plots = {"loss.png": _loss, "accuracy.png": _accuracy, "trees.png": _trees}
    return [name for name, draw in plots.items() if save_plot(draw, figures, folder / name)]


def save_plot(draw: Callable[..., bool], figures: dict[str, Any], path: Path, *, columns: int = 1) -> bool:
    """Writes one picture.

    Args:
        draw: Is given the axes, or an array of them, and the figures; says whether there was anything to draw.
        figures: For `draw`.
        path: Of the PNG.
        columns: Axes side by side.

    Returns:
        Whether it was written: not without matplotlib, nor when there is nothing to draw.
    """
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(6 * columns, 4), layout="constrained")
    drawn = draw(figure.subplots(1, columns), figures)
    if drawn:
        temporary = path.with_name(f".{path.name}")
        figure.savefig(temporary, format="png", dpi=120)
        temporary.replace(path)
    return drawn


def _loss(axes: Any, figures: dict[str, Any]) -> bool:
    entries = [entry for entry in figures["history"] if "loss_head_0" in entry]
    if not entries:
        return False
    for head in range(len(figures["calibration"]["top1"])):
        key = f"loss_head_{head}"
        known = [e for e in entries if key in e]  # later steps may be trained later, or not at all
        if known:
            axes.plot([e["step"] for e in known], [e[key] for e in known], label=f"head {head}")
    axes.set(xlabel="step", ylabel="loss (train)")
    axes.legend()
    return True


def _accuracy(axes: Any, figures: dict[str, Any]) -> bool:
    entries = [entry for entry in figures["history"] if "top1_head_0" in entry]
    for head in range(len(figures["calibration"]["top1"])):
        steps = [entry["step"] for entry in entries]
        (line,) = axes.plot(steps, [entry[f"top1_head_{head}"] for entry in entries], label=f"head {head}")
        axes.plot(steps, [entry[f"top5_head_{head}"] for entry in entries], "--", color=line.get_color())
    axes.set(xlabel="step", ylabel="held-out top-1 (solid), top-5 (dashed)")
    axes.legend()
    return bool(entries)


def _trees(axes: Any, figures: dict[str, Any]) -> bool:
    calibration = figures["calibration"]
    axes.plot(calibration["expected_mu"])
    axes.axvline(calibration["tree_size"], linestyle=":", color="grey")
    axes.set(xlabel="draft nodes of the best tree (dotted: chosen)", ylabel="expected μ")
    return True
