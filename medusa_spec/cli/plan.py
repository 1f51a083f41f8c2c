"""medusa-spec plan: what drafting would bring here, and when not to draft, before anything is served."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from medusa_spec.advice import Advice, advise
from medusa_spec.cli.loading import Loaded, load
from medusa_spec.cli.plan_costs import measure_costs, measure_footprint
from medusa_spec.comparison import Comparison
from medusa_spec.cost import measure_pass_times
from medusa_spec.drafters import HeadsDrafter
from medusa_spec.economics import Costs, Forecast, best_of, by_depth, by_size
from medusa_spec.errors import ConfigError
from medusa_spec.footprint import Footprint
from medusa_spec.machine import LoadWatch, machine_facts
from medusa_spec.measure import compare
from medusa_spec.prompts import Prompt, read_prompts
from medusa_spec.tree import expected_accepted

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""N of the passes that are timed."""

SHOWN = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""Draft nodes of the trees that are listed, besides the best one."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that the command says.

    Attributes:
        labels: Model and heads.
        prefix: Tokens before the passes that were timed.
        costs: Times.
        sizes: By number of draft nodes, the best depth each.
        depths: By number of heads, the best number of draft nodes each; empty if no μ is known.
        best: Of all; None if no μ is known.
        rows: Of the passes in `batch`.
        batch: T(N) by N of passes with several rows; None if not asked for.
        memory: Bytes that heads and a text take.
        advice: When not to draft.
        measured: Against plain decoding, if prompts were given.
        machine: What it was measured on.
        others: Cores that other programs kept busy meanwhile; None if unknown.
    """

    labels: dict[str, Any]
    prefix: int
    costs: Costs
    sizes: list[Forecast]
    depths: list[Forecast]
    best: Forecast | None
    rows: int
    batch: dict[int, float] | None
    memory: Footprint
    advice: list[Advice]
    measured: Comparison | None
    machine: dict[str, Any]
    others: float | None

    def to_dict(self) -> dict[str, Any]:
        """For machines: every figure by name."""
        result = {name: getattr(self, name) for name in ("labels", "prefix", "rows", "batch", "machine")}
        result |= {"costs": asdict(self.costs), "memory": asdict(self.memory) | {"fits": self.memory.fits}}
        result |= {name: [asdict(part) for part in getattr(self, name)] for name in ("sizes", "depths", "advice")}
        result["best"] = None if self.best is None else asdict(self.best)
        result["measured"] = None if self.measured is None else self.measured.to_dict()
        return result | {"busy_cores_elsewhere": self.others}


def plan(
    *,
    model: str | None = None,
    heads: str | None = None,
    prefix: int = 256,
    context: int = 4096,
    batch: int | None = None,
    measure: Path | None = None,
    limit: int = 4,
    max_new_tokens: int = 64,
    repeats: int = 5,
    dtype: str = "auto",
) -> Plan:
    """Measure what passes and drafts cost, and reckon what trees of every size would bring.

    Args:
        model: Folder or hub id of the target, or of heads; None means the default model.
        heads: Folder, packaged name or hub id; None lets the model say.
        prefix: Tokens before the passes that are timed.
        context: Tokens of the text whose memory is reckoned.
        batch: Rows of further passes that are timed; None for none.
        measure: JSON lines of prompts that are decoded plainly and with trees; None for none.
        limit: Of those, so many, taken in turn from all categories.
        max_new_tokens: Decoded of each.
        repeats: Rounds of every measurement; the median counts.
        dtype: Of the weights.

    Raises:
        ConfigError: If there are no heads.
    """
    asked = None if measure is None else read_prompts(measure, limit=limit)
    loaded, load_watch = load(model, heads, None, dtype=dtype, speculation="fixed"), LoadWatch()
    drafter = loaded.model.drafter
    if not isinstance(drafter, HeadsDrafter):
        raise ConfigError(
            f"--heads: expected heads to reckon with, got none with {model or 'the default model'}; name a folder, a "
            "packaged name or a hub id. `medusa-spec bench --drafter ngram` measures look-up in the text itself"
        )
    passes = partial(measure_pass_times, loaded.model.backbone, SIZES, prefix, repeats)
    costs = measure_costs(loaded.model, drafter, passes(), prefix=prefix, repeats=repeats)
    expected = _expected(drafter)
    rows, times = batch or 1, None if batch is None else passes(batch)
    numbers = [n for n in range(1, max(SIZES)) if expected is not None]
    best = best_of(by_size(costs, expected, numbers))
    shown = sorted({*SHOWN, *([] if best is None else [best.nodes])})
    return Plan(
        labels=loaded.labels,
        prefix=prefix,
        costs=costs,
        sizes=by_size(costs, expected, shown),
        depths=[] if expected is None else by_depth(costs, expected, numbers),
        best=best,
        rows=rows,
        batch=times,
        memory=measure_footprint(loaded.model, drafter, context),
        advice=advise(costs, best, times, rows),
        measured=None if asked is None else _measured(loaded, asked, max_new_tokens),
        machine=machine_facts(loaded.model.device, loaded.model.backbone.dtype),
        others=load_watch.others(),
    )


def _expected(drafter: HeadsDrafter) -> Mapping[int, Sequence[float]] | None:
    """Expected μ by depth and draft nodes, as the heads' calibration counted; None if it did not."""
    values = drafter.values
    if values is None:
        return None
    return {depth: expected_accepted(values.up_to(depth), max(SIZES) - 1) for depth in range(1, values.depth + 1)}


def _measured(loaded: Loaded, prompts: list[Prompt], max_new_tokens: int) -> Comparison:
    return compare(loaded.model, None, loaded.tokenizer, prompts, max_new_tokens=max_new_tokens, labels=loaded.labels)
