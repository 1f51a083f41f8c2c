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
        f"covers {training['draft_coverage']:.1%} of the answer tokens{_held_out_coverage(training)}.",
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


def _held_out_coverage(training: dict[str, Any]) -> str:
    share = training.get("held_out_draft_coverage")  # runs of older versions did not count it
    return "" if share is None else f", and {share:.1%} of those held out"


def accuracy_table(calibration: dict[str, Any]) -> str:
    """Top-1 and top-5 by head, and the overlap with the target's probabilities if known, as a Markdown table."""
    columns = {"top-1": "top1", "top-5": "top5", "overlap": "overlap"}
    shown = {title: calibration[key] for title, key in columns.items() if key in calibration}
    rows = [
        f"| {head} | " + " | ".join(f"{share:.3f}" for share in shares) + " |"
        for head, shares in enumerate(zip(*shown.values(), strict=True))
    ]
    return "\n".join(["| head | " + " | ".join(shown) + " |", "|---" * (1 + len(shown)) + "|", *rows])


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
