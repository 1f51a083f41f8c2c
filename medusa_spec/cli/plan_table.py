"""A plan as plain text for people. Computes nothing that `economics` does not."""

from collections.abc import Sequence

from medusa_spec.advice import Advice
from medusa_spec.cli.plan import Plan
from medusa_spec.comparison import Comparison
from medusa_spec.comparison_table import columns
from medusa_spec.economics import Costs, Forecast
from medusa_spec.footprint import Footprint
from medusa_spec.machine import quiet_words

MARKS = {True: "NO ", False: "ok ", None: "if "}
"""What stands before an advice: it speaks against drafting, it does not, it depends on the request."""


def plan_table(plan: Plan) -> str:
    """Passes, trees, heads, memory, measurement, advice, machine: one block of text each."""
    blocks = [
        _passes(plan.costs, plan.batch, plan.rows, plan.prefix),
        _trees(plan.sizes, plan.best),
        _heads(plan.depths, plan.costs),
        _memory(plan.memory),
        _measured(plan.measured),
        _advice(plan.advice),
        quiet_words(plan.others),
    ]
    return "\n\n".join(block for block in blocks if block)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _passes(costs: Costs, batch: dict[int, float] | None, rows: int, prefix: int) -> str:
    table = [
        ["pass over N nodes", *(str(size) for size in costs.passes)],
        ["  T(N), ms", *(_ms(seconds) for seconds in costs.passes.values())],
        ["  T(N) / T(1)", *(f"{costs.ratio(size):.2f}" for size in costs.passes)],
    ]
    if batch is not None:
        table.append([f"  T(N) of {rows} rows, ms", *(_ms(seconds) for seconds in batch.values())])
        table.append([f"  T(N) / T(1) of {rows} rows", *(f"{seconds / batch[1]:.2f}" for seconds in batch.values())])
    rest = f"everything else of a step {_ms(costs.rest)} ms"
    return f"behind {prefix} tokens; {rest}\n{columns(table)}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _figures(found: Forecast) -> list[str]:
    mu = "-" if found.mu is None else f"{found.mu:.2f}"
    return [mu, f"{found.needed:.2f}", _times(found.rule_of_thumb), _times(found.honest)]


def _trees(sizes: Sequence[Forecast], best: Forecast | None) -> str:
    table = [["draft nodes", "heads", "mu", "mu needed", "tau / (tau c + 1)", "tau T(1) / (T(N) + draft + rest)"]]
    for found in sizes:
        mark = "  <- best" if found == best else ""
        table.append([str(found.nodes), str(found.depth), *_figures(found)[:3], _times(found.honest) + mark])
    width = max(len(row[-1]) for row in table)
    table = [[*row[:-1], row[-1].ljust(width)] for row in table]
    note = "mu: counted when the heads were calibrated, of the best static tree; trees that grow gain more"
    if best is None:
        note = "mu: not counted for these heads; a tree pays where it accepts more than the mu needed"
    return f"{columns(table)}\n{note}"


def _heads(depths: Sequence[Forecast], costs: Costs) -> str:
    if not depths:
        return ""
    best = max(depths, key=lambda found: found.rank)
    table = [["heads used", "draft, ms", "draft nodes", "mu", "mu needed", "speed-up"]]
    for found in depths:
        mu, needed, _, honest = _figures(found)
        table.append([str(found.depth), _ms(costs.drafts[found.depth]), str(found.nodes), mu, needed, honest])
    return f"{columns(table)}\nheads worth using: {best.depth} of {len(depths)}"


def _bytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def _memory(memory: Footprint) -> str:
    own = f" and {_bytes(memory.heads_per_token)} in the heads" if memory.heads_per_token else ""
    lines = [
        f"heads {_bytes(memory.heads)}; cache {_bytes(memory.per_token)} a token{own}",
        f"a text of {memory.context} tokens: {_bytes(memory.cache)}",
    ]
    if memory.free is None:
        lines.append("free memory: unknown on this system")
    else:
        lines.append(f"free memory: {_bytes(memory.free)}: it {'fits' if memory.fits else 'DOES NOT FIT'}")
    return "\n".join(lines)


def _measured(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    ratio, stats = comparison.speedup("tree", "plain"), comparison.stats()
    interval = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if len(comparison.records) > 1 else ""
    return (
        f"measured on {len(comparison.records)} prompts with prefill: {ratio.value:.2f}x{interval} plain decoding, "
        f"mu {stats.mu:.2f}, tau {stats.tau:.2f}"
    )


def _advice(advice: Sequence[Advice]) -> str:
    return "\n".join(["when not to draft", *(f"{MARKS[each.holds]} {each.name}: {each.text}." for each in advice)])
