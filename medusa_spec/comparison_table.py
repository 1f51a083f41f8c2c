"""A comparison as plain text for people. Computes nothing that `figures` does not."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from medusa_spec.figures import Ratio, rates_by_depth, tree_size
from medusa_spec.machine import quiet_words
from medusa_spec.stats import DecodingStats

if TYPE_CHECKING:
    from medusa_spec.comparison import Comparison

ARM_NAMES = {
    "hf": "Hugging Face generate",
    "plain": "this project, plain (N = 1)",
    "tree": "this project, tree",
}
PAIR_NAMES = {
    ("tree", "hf"): "tree / Hugging Face",
    ("tree", "plain"): "tree / own plain",
    ("plain", "hf"): "own plain / Hugging Face",
}


def comparison_table(comparison: "Comparison") -> str:
    """Speeds, ratios, acceptance, forecasts, by category, machine: one block of text each."""
    blocks = [
        _speeds(comparison),
        _ratios(comparison),
        _acceptance(comparison),
        _forecasts(comparison),
        _by_category(comparison),
        _machine(comparison),
    ]
    return "\n\n".join(block for block in blocks if block)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as aligned text: first column to the left, all others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *others = [
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join([first, *others]).rstrip())
    return "\n".join(lines)


def _times(ratio: Ratio) -> str:
    return f"{ratio.value:.2f}x"


def _interval(ratio: Ratio, prompts: int) -> str:
    if prompts < 2:
        return "-"  # one prompt has no spread to resample
    return f"[{ratio.low:.2f}, {ratio.high:.2f}]"


def _speeds(comparison: "Comparison") -> str:
    rows = [["decoding", "tokens", "seconds", "tokens/s"]]
    for arm in comparison.arms:
        runs = [record.runs[arm] for record in comparison.records]
        tokens = sum(len(run.tokens) for run in runs)
        seconds = sum(run.seconds for run in runs)
        rows.append([ARM_NAMES[arm], str(tokens), f"{seconds:.2f}", f"{tokens / seconds:.1f}"])
    return f"{len(comparison.records)} prompts\n{columns(rows)}"


def _ratios(comparison: "Comparison") -> str:
    rows = [["tokens/s, ratio", "times", "95 %", "same output", "first differences at"]]
    for fast, slow in comparison.pairs:
        ratio, equality = comparison.speedup(fast, slow), comparison.equality(fast, slow)
        shown = ", ".join(str(place) for place in equality.first_differences[:5])
        more = ", …" if len(equality.first_differences) > 5 else ""
        same = f"{equality.equal} of {equality.of}"
        name = PAIR_NAMES[fast, slow]
        rows.append([name, _times(ratio), _interval(ratio, len(comparison.records)), same, shown + more or "-"])
    text = columns(rows)
    if comparison.machine.get("dtype") in ("bfloat16", "float16"):
        text += (
            "\nIn 16-bit arithmetic a pass over many tokens rounds unlike passes over one: where "
            "the two\nlikeliest tokens are as good as tied, outputs may differ. The share that is "
            "equal is above."
        )
    return text


def _acceptance(comparison: "Comparison") -> str:
    stats = comparison.stats()
    head = (
        f"mu {stats.mu:.2f} accepted draft tokens per drafted pass, tau {stats.tau:.2f} tokens "
        f"per pass; {tree_size(stats):.1f} nodes per pass; {stats.rule}"
    )
    rates = rates_by_depth(stats)
    rows = [["accepted at depth", *(str(depth) for depth in range(1, len(rates) + 1))]]
    rows.append(["  of all drafted passes", *(f"{marginal:.3f}" for marginal, _ in rates)])
    rows.append(["  if the one above was", *(f"{given:.3f}" for _, given in rates)])
    share = ", ".join(f"{name} {part:.1%}" for name, part in stats.share.items())
    return "\n".join([head, *_decisions(stats), columns(rows), f"share of decoding time: {share}"])


def _decisions(stats: DecodingStats) -> list[str]:
    if not stats.decisions:
        return []
    given_up = sum(not decision.drafting for decision in stats.decisions)
    return [
        f"the controller drafted at {stats.drafted_passes / stats.passes:.0%} of the passes, gave up {given_up} times"
    ]


def _forecasts(comparison: "Comparison") -> str:
    found = comparison.economics()
    tau = comparison.stats().tau
    times = f"T(1) {found.plain_pass * 1e3:.2f} ms, T(N) {found.tree_pass * 1e3:.2f} ms"
    rows = [
        ["speed-up over own plain", "times"],
        ["  rule of thumb, tau / (tau c + 1)", f"{found.rule_of_thumb:.2f}x"],
        ["  honest, tau T(1) / (T(N) + draft + rest)", f"{found.honest:.2f}x"],
        ["  measured, prefill included", _times(comparison.speedup("tree", "plain"))],
    ]
    return (
        f"{columns(rows)}\ntau {tau:.2f}, c {found.draft_cost:.3f}, {times}, draft and rest {found.other * 1e3:.2f} ms"
    )


def _by_category(comparison: "Comparison") -> str:
    if len(comparison.categories) < 2:
        return ""
    pairs = comparison.pairs
    rows = [["category", "prompts", "mu", "tau", "tokens/s"]]
    rows[0] += [f"{fast}/{slow}" for fast, slow in pairs] + ["95 %", "same"]
    for name in comparison.categories:
        part = comparison.only(name)
        stats, first = part.stats(), part.speedup(*pairs[0])
        equality = part.equality("tree", "plain")
        row = [name or "-", str(len(part.records)), f"{stats.mu:.2f}", f"{stats.tau:.2f}"]
        row += [f"{part.tokens_per_second('tree'):.1f}"]
        row += [_times(part.speedup(*pair)) for pair in pairs]
        rows.append([*row, _interval(first, len(part.records)), f"{equality.equal}/{equality.of}"])
    first_pair, note = "/".join(pairs[0]), "(95 %: of {}; same: tree and own plain)"
    return f"{columns(rows)}\n{note.format(first_pair)}"


def _machine(comparison: "Comparison") -> str:
    facts = comparison.machine
    lines = [f"{name}: {value}" for name, value in comparison.settings.items() if value is not None]
    if facts:
        versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
        lines.append(f"{facts['device']}, {facts['dtype']}, {facts['threads']} threads, {versions}")
        memory = facts.get("peak_memory_mib")
        memory_text = f"peak memory {memory:.0f} MiB, " if memory else ""
        lines.append(f"{memory_text}revision {facts['revision'] or 'unknown'}")
    lines.append(quiet_words(comparison.others))
    return "\n".join(lines)
