"""What a comparison with other engines found, as figures ready for JSON. Runs nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_spec.figures import Run, first_difference, speed_ratio

BASELINE = "hf"
ENGINE = "vllm"
"""Family whose best way is the other thing that ways are compared with."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One prompt.

    Attributes:
        name: Of the prompt.
        category: Its kind.
        runs: By way.
        counters: By way; None where it tells none.
    """

    name: str
    category: str
    runs: dict[str, Run]
    counters: dict[str, dict[str, Any] | None]


def figures(records: Sequence[Record], *, seed: int = 0) -> dict[str, Any]:
    """Figures of all prompts (`all`) and by category (`by_category`), and the runs themselves (`records`).

    Args:
        records: With the same ways in each, `hf` among them.
        seed: Of the bootstrap.
    """
    by_category: dict[str, list[Record]] = {}
    for record in records:
        by_category.setdefault(record.category, []).append(record)
    return {
        "all": _group(records, seed),
        "by_category": {name: _group(part, seed) for name, part in by_category.items()},
        "records": [_plain(record) for record in records],
    }


def _group(records: Sequence[Record], seed: int) -> dict[str, Any]:
    runs = {way: [record.runs[way] for record in records] for way in records[0].runs}
    speeds = {
        way: sum(len(run.tokens) for run in some) / sum(run.seconds for run in some) for way, some in runs.items()
    }
    engines = [way for way in runs if way.split("-")[0] == ENGINE]
    best = max(engines, key=speeds.__getitem__, default=None)
    found = {}
    for way in runs:
        found[way] = {
            "tokens": sum(len(run.tokens) for run in runs[way]),
            "seconds": sum(run.seconds for run in runs[way]),
            "tokens_per_second": speeds[way],
            "times_hf": _ratio(runs, way, BASELINE, seed),
            "times_best_vllm": _ratio(runs, way, best, seed),
            "equal_to_own_plain": _equal(runs, way, way.split("-")[0]),
            "equal_to_hf": _equal(runs, way, BASELINE),
        } | _rates([record.counters[way] for record in records])
    return {"prompts": len(records), "best_vllm": best, "ways": found}


def _ratio(runs: Mapping[str, list[Run]], fast: str, slow: str | None, seed: int) -> dict[str, float] | None:
    if slow is None or slow not in runs:
        return None
    return speed_ratio(runs[fast], runs[slow], seed=seed)._asdict()


def _equal(runs: Mapping[str, list[Run]], one: str, other: str) -> int | None:
    """How many outputs are the same, token for token."""
    if other not in runs:
        return None
    pairs = zip(runs[one], runs[other], strict=True)
    return sum(first_difference(left.tokens, right.tokens) is None for left, right in pairs)


def _rates(counters: Sequence[dict[str, Any] | None]) -> dict[str, float | None]:
    """`mu`, accepted draft tokens per pass with a draft, and `tau`, tokens per pass after the prompt's."""

    def rate(part: str, whole: str) -> float | None:
        known = [count for count in counters if count is not None and count[part] is not None]
        of = sum(count[whole] or 0 for count in known)
        return sum(count[part] for count in known) / of if of else None

    return {"mu": rate("accepted", "drafts"), "tau": rate("gained", "passes")}


def _plain(record: Record) -> dict[str, Any]:
    """Without tokens."""
    runs = {
        way: {"tokens": len(run.tokens), "seconds": run.seconds, "counters": record.counters[way]}
        for way, run in record.runs.items()
    }
    return {"name": record.name, "category": record.category, "runs": runs}
