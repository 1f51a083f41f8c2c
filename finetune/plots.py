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
    plots = {
        "loss.png": _loss,
        "gradients.png": _gradients,
        "accuracy.png": _accuracy,
        "ranks.png": _ranks,
        "decoder.png": _decoder,
        "acceptance.png": _acceptance,
        "trees.png": _trees,
    }
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


def _lines(axes: Any, figures: dict[str, Any], names: dict[str, str]) -> bool:
    """Draws entries of the log by step; a name that no entry has is left out.

    Args:
        axes: To draw on.
        figures: Of the run.
        names: Of the entries, to labels.
    """
    for name, label in names.items():
        known = [entry for entry in figures["history"] if name in entry]  # later steps may be trained later, or not
        if known:
            axes.plot([entry["step"] for entry in known], [entry[name] for entry in known], label=label)
    axes.set(xlabel="step")
    if axes.lines:
        axes.legend()
    return bool(axes.lines)


def _by_head(figures: dict[str, Any], name: str) -> dict[str, str]:
    return {f"{name}_head_{head}": f"head {head}" for head in range(len(figures["calibration"]["top1"]))}


def _loss(axes: Any, figures: dict[str, Any]) -> bool:
    axes.set(ylabel="loss (train)")
    return _lines(axes, figures, _by_head(figures, "loss"))


def _gradients(axes: Any, figures: dict[str, Any]) -> bool:
    axes.set(ylabel="norm of the gradient, before clipping", yscale="log")
    return _lines(axes, figures, _by_head(figures, "grad_norm"))


def _decoder(axes: Any, figures: dict[str, Any]) -> bool:
    axes.set(ylabel="decoder on a few held-out prompts, a chain")
    depths = range(1, 1 + len(figures["calibration"]["top1"]))
    return _lines(axes, figures, {"decoder_mu": "μ"} | {f"decoder_depth_{d}": f"accepted at depth {d}" for d in depths})


def _accuracy(axes: Any, figures: dict[str, Any]) -> bool:
    entries = [entry for entry in figures["history"] if "top1_head_0" in entry]
    for head in range(len(figures["calibration"]["top1"])):
        steps = [entry["step"] for entry in entries]
        (line,) = axes.plot(steps, [entry[f"top1_head_{head}"] for entry in entries], label=f"head {head}")
        axes.plot(steps, [entry[f"top5_head_{head}"] for entry in entries], "--", color=line.get_color())
    axes.set(xlabel="step", ylabel="held-out top-1 (solid), top-5 (dashed)")
    axes.legend()
    return bool(entries)


def _ranks(axes: Any, figures: dict[str, Any]) -> bool:
    """Whether the truth is among the first guesses, by how many there are."""
    for head, shares in enumerate(figures.get("ranks", [])):
        within = [sum(shares[: rank + 1]) for rank in range(len(shares))]
        axes.plot(range(1, len(shares) + 1), within, "o-", label=f"head {head}")
    axes.set(xlabel="guesses of a head", ylabel="truth among them (held out)", ylim=(0, 1))
    if axes.lines:
        axes.legend()
    return bool(axes.lines)


def _acceptance(axes: Any, figures: dict[str, Any]) -> bool:
    measured = figures["measured"]
    rows = {"of all drafts": "accepted_marginal", "if the node above was": "accepted_conditional"}
    for place, (label, name) in enumerate(rows.items()):
        shares = measured.get(name, [])
        middles = [depth - 0.2 + 0.4 * place for depth in range(1, len(shares) + 1)]
        axes.bar(middles, shares, width=0.4, label=label)
    depths = range(1, 1 + len(measured.get("accepted_marginal", [])))
    axes.set(xlabel="depth", ylabel="accepted in the decoder (held out)", ylim=(0, 1), xticks=depths)
    axes.legend()
    return bool(measured.get("accepted_marginal"))


def _trees(axes: Any, figures: dict[str, Any]) -> bool:
    calibration = figures["calibration"]
    axes.plot(calibration["expected_mu"])
    axes.axvline(calibration["tree_size"], linestyle=":", color="grey")
    axes.set(xlabel="draft nodes of the best tree (dotted: chosen)", ylabel="expected μ")
    return True
