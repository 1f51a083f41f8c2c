"""The arithmetic of a comparison: ratios with intervals, first differences, forecasts, rates."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch

from medusa_spec.stats import DecodingStats

RESAMPLES = 2000


class Run(NamedTuple):
    """One arm on one prompt: new tokens up to and including EOS, seconds of the whole call."""

    tokens: tuple[int, ...]
    seconds: float


class Ratio(NamedTuple):
    """A ratio of speeds with its 95 % bootstrap interval over prompts."""

    value: float
    low: float
    high: float


class Equality(NamedTuple):
    """How many outputs of two arms agree, and where the others first differ."""

    equal: int
    of: int
    first_differences: tuple[int, ...]


class Economics(NamedTuple):
    """Two forecasts of the speed-up over plain decoding, to be read beside the measured one.

    `rule_of_thumb` is tau / (tau * c + 1), c being the drafting time per token gained in units of
    T(1): it believes that a tree pass costs no more than a plain one. `honest` is
    tau * T(1) / (T(N) + draft + rest), times per pass.
    """

    rule_of_thumb: float
    honest: float
    draft_cost: float
    plain_pass: float
    tree_pass: float
    other: float


def speed_ratio(fast: Sequence[Run], slow: Sequence[Run], *, seed: int = 0) -> Ratio:
    """Ratio of seconds per token, slow over fast, with its bootstrap interval over prompts.

    Sums come first (all seconds over all tokens), so that long answers count as much as they last.
    """
    columns = torch.tensor(
        [(one.seconds, len(one.tokens), two.seconds, len(two.tokens)) for one, two in zip(fast, slow, strict=True)],
        dtype=torch.float64,
    )
    draws = torch.randint(len(columns), (RESAMPLES, len(columns)), generator=torch.Generator().manual_seed(seed))
    sums = torch.cat([columns.sum(0, keepdim=True), columns[draws].sum(1)])
    ratios = (sums[:, 2] / sums[:, 3]) / (sums[:, 0] / sums[:, 1])
    low, high = ratios[1:].quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Ratio(float(ratios[0]), low, high)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs (or that only one has); None if there is none."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def forecast(*, tau: float, plain_pass: float, per_pass: Mapping[str, float]) -> Economics:
    """Both forecasts from tau, T(1) and the seconds per pass of each phase.

    Prefill, if named, is left out: both ways of decoding pay it alike.
    """
    verify = per_pass["verify"]
    other = sum(time for phase, time in per_pass.items() if phase not in ("prefill", "verify"))
    cost = per_pass["draft"] / tau / plain_pass if tau and plain_pass else 0.0
    return Economics(
        rule_of_thumb=tau / (tau * cost + 1),
        honest=tau * plain_pass / (verify + other) if verify + other else 0.0,
        draft_cost=cost,
        plain_pass=plain_pass,
        tree_pass=verify,
        other=other,
    )


def rates_by_depth(stats: DecodingStats) -> list[tuple[float, float]]:
    """(marginal, conditional) share of accepted nodes at depth 1, 2, …

    Marginal: per drafted pass. Conditional: of the times that a draft went on there.
    """
    passes = max(stats.drafted_passes, 1)
    counts = zip_longest(stats.accepted_by_depth, stats.offered_by_depth, fillvalue=0)
    return [(accepted / passes, accepted / max(offered, 1)) for accepted, offered in counts]


def tree_size(stats: DecodingStats) -> float:
    """Mean number of nodes of a verify pass, root included."""
    total = sum(size * times for size, times in stats.pass_sizes.items())
    return total / max(stats.passes, 1)
