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
        *training_lines(figures.get("history", [])),
        *data_lines(figures.get("data", {})),
        "## Heads on held-out states",
        accuracy_table(calibration),
        *target_lines(training.get("target")),
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


def training_lines(history: Sequence[dict[str, float]]) -> list[str]:
    """What was seen while heads were trained, as paragraphs.

    Args:
        history: The log of the training.
    """
    told = []
    decoded = [entry for entry in history if "decoder_mu" in entry]
    if decoded:
        seconds = sum(entry["decoder_seconds"] for entry in decoded)
        told.append(
            f"While they were trained a few held-out prompts were decoded with a chain of first guesses: μ "
            f"{decoded[0]['decoder_mu']:.3f} at step {decoded[0]['step']}, {decoded[-1]['decoder_mu']:.3f} at the end "
            f"({seconds:.0f} s in all)."
        )
    masked = sum(int(entry.get("masked_batches", 0)) for entry in history)
    if masked:
        told.append(f"Batches without any position to learn from, which changed little: {masked}.")
    return told


def data_lines(data: dict[str, Any]) -> list[str]:
    """What became of the records, as paragraphs; nothing for data of an older version.

    Args:
        data: The manifest of the data stage.
    """
    if "answers" not in data:
        return []
    answers, unusable = data["answers"], data["unusable"]
    length = data["settings"]["max_length"]
    dropped = data["settings"].get
    loops = "left out" if dropped("drop_loops") else "trained on all the same"
    repeated = "left out" if dropped("drop_duplicates") else "kept"
    rows = [
        (f"conversations cut at {length} tokens", data["cut"]),
        ("conversations skipped, without an answer of two tokens", data["skipped"]),
        (f"conversations that are copies of others, {repeated}", data["duplicates"]),
        ("last answers that did not end by themselves", data["unfinished"]),
        ("records that could not be used, left out", unusable["records"]),
        (f"answers cut off, or behind the first {length} tokens", answers["cut"]),
        (f"answers that end in repetition, which is easy to guess, {loops}", answers["looping"]),
        ("answers not trained on, since the chat template shows them differently later", answers["rewritten"]),
        ("answers not trained on, since their weight is 0", answers["weightless"]),
        *data["template"].items(),
    ]
    told = [f"- {words}: {count}" for words, count in rows if count]
    told += [f"- left out: {error}" for error in unusable["first"]]
    return [f"Of {data['records']} records with {answers['read']} answers:", "\n".join(told)] if told else []


def accuracy_table(calibration: dict[str, Any]) -> str:
    """Top-1 and top-5 by head, and the overlap with the target's probabilities if known, as a Markdown table."""
    columns = {"top-1": "top1", "top-5": "top5", "overlap": "overlap", "top-1 without the adapter": "base_top1"}
    shown = {title: calibration[key] for title, key in columns.items() if key in calibration}
    rows = [
        f"| {head} | " + " | ".join(f"{share:.3f}" for share in shares) + " |"
        for head, shares in enumerate(zip(*shown.values(), strict=True))
    ]
    return "\n".join(["| head | " + " | ".join(shown) + " |", "|---" * (1 + len(shown)) + "|", *rows])


def target_lines(found: dict[str, Any] | None) -> list[str]:
    """What joint training did to the target; nothing where it was left as it is."""
    if found is None:
        return []
    before, after = (", ".join(f"{share:.3f}" for share in found[key]) for key in ("top1_before", "top1"))
    return [
        "## The adapted target",
        "The target has an adapter that was trained with the heads: figures of the decoder, and the output, are the "
        "adapted model's.",
        "| | without the adapter | with it |\n|---|---|---|\n"
        f"| perplexity of held-out answers | {found['perplexity_without']:.4f} | {found['perplexity']:.4f} "
        f"({found['perplexity_change']:+.2%}) |\n"
        f"| top-1 by head, before and after both were trained | {before} | {after} |",
        f"Its greedy choice is the same at {found['same_choice']:.2%} of {found['positions']} positions; divergence "
        f"of its choices: {found['divergence']:.4f} nats.",
    ]


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
