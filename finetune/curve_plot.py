"""The data-size curve as a picture. Knows records of points, trains nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_spec.finetune.plots import save_plot

TREES = (7, 15, 31, 63)
"""Draft nodes whose expected μ is shown, where a record has them."""


def draw_curve(points: Sequence[dict[str, Any]], path: Path) -> bool:
    """Writes expected μ and top-1 by answer tokens as PNG.

    Args:
        points: Records of `measure_point`.
        path: Of the picture.

    Returns:
        Whether it was written: not without matplotlib.
    """
    return save_plot(_curve, {"points": sorted(points, key=lambda point: int(point["answer_tokens"]))}, path, columns=2)


def _curve(axes: Any, figures: dict[str, Any]) -> bool:
    points = figures["points"]
    tokens = [point["answer_tokens"] for point in points]
    for size in TREES:
        if all(size < len(point["expected_mu"]) for point in points):
            axes[0].plot(tokens, [point["expected_mu"][size] for point in points], "o-", label=f"{size} draft nodes")
    axes[0].set(xscale="log", xlabel="answer tokens trained on", ylabel="expected μ (held out)")
    for head in range(min(len(point["top1"]) for point in points)):
        axes[1].plot(tokens, [point["top1"][head] for point in points], "o-", label=f"head {head}")
    axes[1].set(xscale="log", xlabel="answer tokens trained on", ylabel="top-1 (held out)")
    for place in axes:
        place.legend()
    return True
