"""What drafting brings, reckoned from times and expected gains before anything is decoded. Knows numbers only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf

from medusa_spec.cost import interpolate
from medusa_spec.figures import forecast


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of the parts of a step.

    Attributes:
        passes: T(N) by N, 1 among them.
        drafts: Of a draft by its depth, 1 to K.
        rest: Of everything of a drafted step beside draft and pass.
        reading: Once a text: what the first draft takes longer than the others (heads that attend read the prompt).
    """

    passes: Mapping[int, float]
    drafts: Mapping[int, float]
    rest: float = 0.0
    reading: float = 0.0

    @property
    def plain(self) -> float:
        """T(1)."""
        return self.passes[1]

    def ratio(self, size: int) -> float:
        """T(N) / T(1)."""
        return interpolate(self.passes, size) / self.plain


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What trees of one size and depth would bring over plain decoding.

    Attributes:
        nodes: Draft nodes.
        depth: Heads that are asked.
        mu: Expected accepted tokens per drafted pass; None where it is not known.
        needed: μ at which it would be as fast as plain decoding.
        rule_of_thumb: tau / (tau * c + 1), which believes that a pass over a tree costs no more than a plain one.
        honest: tau * T(1) / (T(N) + draft + rest).
    """

    nodes: int
    depth: int
    mu: float | None
    needed: float
    rule_of_thumb: float | None = None
    honest: float | None = None

    @property
    def rank(self) -> tuple[float, float, int, int]:
        """Greatest for the best one; without μ for the one that needs least. Smaller trees win ties."""
        return self.honest or 0.0, -self.needed, -self.nodes, -self.depth


def forecast_tree(costs: Costs, *, nodes: int, depth: int, mu: float | None) -> Forecast:
    """Both formulas for one tree.

    ```
    T(1) 10 ms, T(4) 12 ms, draft 2 ms, rest 1 ms, μ 1         honest 2 * 10 / 15 = 1.33, needed μ 15 / 10 - 1 = .5
    ```
    """
    per_pass = {"verify": interpolate(costs.passes, nodes + 1), "draft": costs.drafts[depth], "rest": costs.rest}
    needed = sum(per_pass.values()) / costs.plain - 1.0
    if mu is None:
        return Forecast(nodes=nodes, depth=depth, mu=None, needed=needed)
    found = forecast(tau=1.0 + mu, plain_pass=costs.plain, per_pass=per_pass)
    return Forecast(
        nodes=nodes,
        depth=depth,
        mu=mu,
        needed=needed,
        rule_of_thumb=found.rule_of_thumb,
        honest=found.honest,
    )


def by_size(costs: Costs, expected: Mapping[int, Sequence[float]] | None, sizes: Sequence[int]) -> list[Forecast]:
    """The best depth for every number of draft nodes.

    Args:
        costs: Times.
        expected: By depth: expected μ of the best tree of 0, 1, 2, … draft nodes that is no deeper; None if nothing was
            counted, which leaves one guess a depth.
        sizes: Numbers of draft nodes; those that no counted tree has are left out.
    """
    found = []
    for nodes in sizes:
        options = _options(costs, expected, nodes)
        if options:
            found.append(max(options, key=lambda option: option.rank))
    return found


def by_depth(costs: Costs, expected: Mapping[int, Sequence[float]], sizes: Sequence[int]) -> list[Forecast]:
    """The best number of draft nodes for every number of heads that are asked."""
    found = []
    for depth in sorted(expected):
        options = [
            forecast_tree(costs, nodes=nodes, depth=depth, mu=expected[depth][nodes])
            for nodes in sizes
            if nodes < len(expected[depth])
        ]
        if options:
            found.append(max(options, key=lambda option: option.rank))
    return found


def _options(costs: Costs, expected: Mapping[int, Sequence[float]] | None, nodes: int) -> list[Forecast]:
    if expected is None:
        depth = min(nodes, max(costs.drafts))
        return [forecast_tree(costs, nodes=nodes, depth=depth, mu=None)]
    known = {depth: gains for depth, gains in expected.items() if nodes < len(gains)}
    return [forecast_tree(costs, nodes=nodes, depth=depth, mu=gains[nodes]) for depth, gains in known.items()]


def best_of(forecasts: Sequence[Forecast]) -> Forecast | None:
    """The one that brings most; None if there is none, or none of which μ is known."""
    known = [found for found in forecasts if found.honest is not None]
    return max(known, key=lambda option: option.rank) if known else None


def paid_back_after(costs: Costs, best: Forecast) -> float:
    """New tokens after which a text has saved what its first draft took longer; infinite if drafting saves nothing."""
    saved = costs.plain * (1.0 - 1.0 / best.honest) if best.honest else 0.0
    return ceil(costs.reading / saved) if saved > 0 else inf


def in_batch(costs: Costs, batch: Mapping[int, float], best: Forecast) -> Forecast:
    """The same tree in passes over several rows: every row accepts as many, the draft is believed to cost no more.

    Args:
        costs: Of one row.
        batch: T(N) by N, of a pass with a tree in each row.
        best: The tree.
    """
    rows = Costs(passes=batch, drafts=costs.drafts, rest=costs.rest)
    return forecast_tree(rows, nodes=best.nodes, depth=best.depth, mu=best.mu)
