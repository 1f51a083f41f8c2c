"""What a comparison found: speeds, ratios, equality, acceptance. Runs no model."""

import json
from dataclasses import dataclass, field
from typing import Any

from medusa_spec.comparison_table import comparison_table
from medusa_spec.figures import (
    Economics,
    Equality,
    Ratio,
    Run,
    first_difference,
    forecast,
    rates_by_depth,
    speed_ratio,
    tree_size,
)
from medusa_spec.stats import DecodingStats


@dataclass(frozen=True, kw_only=True)
class PromptRecord:
    """One prompt: its runs by arm ("hf", "plain", "tree") and what the decoding counted."""

    category: str
    name: str
    runs: dict[str, Run]
    tree_stats: DecodingStats
    plain_stats: DecodingStats


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of `measure.compare`.

    Attributes:
        records: One per prompt.
        settings: What was decoded, and how.
        machine: What it was measured on.
        others: Cores that other programs kept busy meanwhile; None if unknown.
        seed: Of the bootstrap.
    """

    records: tuple[PromptRecord, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    others: float | None = None
    seed: int = 0

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms measured, in reading order."""
        return tuple(arm for arm in ("hf", "plain", "tree") if arm in self.records[0].runs)

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The (fast, slow) arms whose speeds and outputs are compared."""
        pairs = (("tree", "hf"), ("tree", "plain"), ("plain", "hf"))
        return tuple(pair for pair in pairs if set(pair) <= set(self.arms))

    @property
    def categories(self) -> tuple[str, ...]:
        """The categories, in the order of their first prompt."""
        return tuple(dict.fromkeys(record.category for record in self.records))

    def only(self, category: str) -> "Comparison":
        """The same, of one category's prompts."""
        records = tuple(record for record in self.records if record.category == category)
        return Comparison(
            records=records,
            settings=self.settings,
            machine=self.machine,
            others=self.others,
            seed=self.seed,
        )

    def tokens_per_second(self, arm: str) -> float:
        """New tokens of all prompts over the seconds they took."""
        runs = [record.runs[arm] for record in self.records]
        return sum(len(run.tokens) for run in runs) / sum(run.seconds for run in runs)

    def speedup(self, fast: str, slow: str) -> Ratio:
        """How many times as many tokens per second `fast` gives as `slow`."""
        return speed_ratio(
            [record.runs[fast] for record in self.records],
            [record.runs[slow] for record in self.records],
            seed=self.seed,
        )

    def equality(self, one: str, other: str) -> Equality:
        """Outputs of two arms that are the same, token for token."""
        differences = [first_difference(record.runs[one].tokens, record.runs[other].tokens) for record in self.records]
        found = tuple(place for place in differences if place is not None)
        return Equality(len(differences) - len(found), len(differences), found)

    def stats(self, arm: str = "tree") -> DecodingStats:
        """What the decoding of an arm ("tree" or "plain") counted, over all prompts."""
        every = [getattr(record, f"{arm}_stats") for record in self.records]
        total = every[0]
        for stats in every[1:]:
            total = total.merge(stats)
        return total

    def economics(self) -> Economics:
        """Rule of thumb and honest forecast, from the time of each phase."""
        tree, plain = self.stats("tree"), self.stats("plain")
        return forecast(
            tau=tree.tau,
            plain_pass=plain.seconds["verify"] / max(plain.passes, 1),
            per_pass={name: time / max(tree.passes, 1) for name, time in tree.seconds.items()},
        )

    def table(self) -> str:
        """For people: plain text."""
        return comparison_table(self)

    def to_dict(self) -> dict[str, Any]:
        """For machines: every figure by name."""
        result: dict[str, Any] = {"settings": self.settings, "machine": self.machine}
        result["busy_cores_elsewhere"] = self.others
        result |= _figures(self)
        result["economics"] = self.economics()._asdict()
        if len(self.categories) > 1:
            result["by_category"] = {name: _figures(self.only(name)) for name in self.categories}
        return result

    def to_json(self) -> str:
        """`to_dict` on one line."""
        return json.dumps(self.to_dict())


def _figures(comparison: Comparison) -> dict[str, Any]:
    """The figures that exist for all prompts and for each category."""
    stats = comparison.stats()
    rates = rates_by_depth(stats)
    return {
        "prompts": len(comparison.records),
        "tokens": {arm: sum(len(record.runs[arm].tokens) for record in comparison.records) for arm in comparison.arms},
        "tokens_per_second": {arm: comparison.tokens_per_second(arm) for arm in comparison.arms},
        "speedup": {f"{fast}/{slow}": comparison.speedup(fast, slow)._asdict() for fast, slow in comparison.pairs},
        "equal": {f"{one}/{other}": comparison.equality(one, other)._asdict() for one, other in comparison.pairs},
        "mu": stats.mu,
        "tau": stats.tau,
        "nodes_per_pass": tree_size(stats),
        "accepted_marginal": [marginal for marginal, _ in rates],
        "accepted_conditional": [conditional for _, conditional in rates],
        "share_of_time": dict(stats.share),
    }
