"""The report as text for people. Knows figures, runs nothing."""

from collections.abc import Sequence
from typing import Any


def report_text(figures: dict[str, Any], table: str, plots: Sequence[str]) -> str:
    """The contents of report.md.

    Args:
        figures: The contents of report.json.
        table: The comparison's table.
        plots: Names of the plot files beside it.
    """
    calibration, training, loops = (figures[key] for key in ("calibration", "training", "loops"))
    splits = training["data"]
    parts = [
        "# Report",
        f"Trained on {splits['train']['conversations']} conversations ({splits['train']['answer_tokens']} answer "
        f"tokens), held out {splits['held_out']['conversations']}; {training['steps']} steps. The draft vocabulary "
        f"covers {training['draft_coverage']:.1%} of the answer tokens.",
        "## Heads on held-out states",
        accuracy_table(calibration),
        "## Trees",
        tree_table(calibration["expected_mu"], training["expected_mu"]),
        f"Chosen: {calibration['tree_size']} draft nodes.",
        "## Decoder on held-out prompts",
        f"```\n{table}\n```",
        loop_line(loops),
        *(f"![{name}]({name})" for name in plots),
    ]
    return "\n\n".join(parts) + "\n"


def accuracy_table(calibration: dict[str, Any]) -> str:
    """Top-1 and top-5 by head, as a Markdown table."""
    rows = [
        f"| {head} | {top1:.3f} | {top5:.3f} |"
        for head, (top1, top5) in enumerate(zip(calibration["top1"], calibration["top5"], strict=True))
    ]
    return "\n".join(["| head | top-1 | top-5 |", "|---|---|---|", *rows])


def tree_table(expected: Sequence[float], shown: dict[str, float]) -> str:
    """Expected μ of the best tree by size, as a Markdown table."""
    rows = [f"| {size} | {expected[int(size)]:.3f} |" for size in shown]
    return "\n".join(["| draft nodes | expected μ |", "|---|---|", *rows])


def loop_line(loops: dict[str, Any]) -> str:
    """What repetition adds to μ."""
    if "mu" not in loops:
        return f"All {loops['of']} answers end in repetition: the figures above flatter the heads."
    return (
        f"{loops['looping']} of {loops['of']} answers end in repetition, which is easy to guess; without them "
        f"μ is {loops['mu']:.3f} and τ {loops['tau']:.3f}."
    )
