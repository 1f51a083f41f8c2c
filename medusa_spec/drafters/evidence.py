"""How often what followed before follows again, by what speaks for it. Knows counts, no tokens."""

from bisect import bisect_left
from collections.abc import Sequence
from enum import IntEnum

BOUNDS = (2, 3, 4, 6, 9, 14, 22)
"""Longest match of each bucket of lengths; the last bucket, behind them, has none."""

PRIOR_WEIGHT = 12.0
"""Guesses that what was believed before counts for."""

MEMORY = 4096.0
"""Guesses of one kind after which all of them count half: what is decoded changes."""

_BUCKETS = tuple(bisect_left(BOUNDS, length) for length in range(BOUNDS[-1] + 2))


def bucket_of(length: int) -> int:
    """The bucket of a match of so many tokens."""
    return _BUCKETS[min(length, BOUNDS[-1] + 1)]


class Support(IntEnum):
    """What speaks for a token among those that followed where the context stood.

    The first is the one that the longest match speaks for, and of equals the most places.
    """

    ALONE = 0
    """It followed at the only place."""
    AGREED = 1
    """It followed at all places, two or more."""
    MOST = 2
    """The first, followed at more than half of the places."""
    FEW = 3
    """The first, followed at no more than half of them."""
    SECOND = 4
    """Next after the first."""
    FURTHER = 5
    """After the second."""


BELIEVED: dict[Support, tuple[float, ...]] = {
    Support.ALONE: (0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.92),
    Support.AGREED: (0.45, 0.55, 0.65, 0.7, 0.78, 0.85, 0.9, 0.95),
    Support.MOST: (0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7),
    Support.FEW: (0.2, 0.25, 0.28, 0.32, 0.36, 0.4, 0.45, 0.5),
    Support.SECOND: (0.08, 0.1, 0.11, 0.12, 0.14, 0.16, 0.18, 0.2),
    Support.FURTHER: (0.03, 0.04, 0.04, 0.05, 0.05, 0.06, 0.07, 0.08),
}
"""Chances by bucket of lengths before anything was counted."""


class Evidence:
    """The chance that a token that followed before is right, by support and length of the match.

    Counts of what was right begin as `PRIOR_WEIGHT` guesses of the prior's chances. A longer match never says less:
    what is counted of neighbouring lengths against that is pooled.

    Args:
        prior: Believed before anything is counted here, and told what is counted here; None for `BELIEVED`.
    """

    def __init__(self, prior: "Evidence | None" = None) -> None:
        self.prior = prior
        self._right = [[0.0] * (len(BOUNDS) + 1) for _ in Support]
        self._tried = [[0.0] * (len(BOUNDS) + 1) for _ in Support]
        self._rows: list[Sequence[float] | None] = [None] * len(Support)

    def chance(self, support: Support, length: int) -> float:
        """The chance of a token with this support, behind a match of so many tokens."""
        return self.row(support)[bucket_of(length)]

    def row(self, support: Support) -> Sequence[float]:
        """Chances by bucket of lengths; they never fall."""
        row = self._rows[support]
        if row is None:
            believed = BELIEVED[support] if self.prior is None else self.prior.row(support)
            weights = [PRIOR_WEIGHT + tried for tried in self._tried[support]]
            sums = [PRIOR_WEIGHT * chance + right for chance, right in zip(believed, self._right[support], strict=True)]
            row = self._rows[support] = rising(sums, weights)
        return row

    def learn(self, support: Support, length: int, right: bool) -> None:
        """Is told whether such a token was right."""
        bucket = bucket_of(length)
        tried, rights = self._tried[support], self._right[support]
        if tried[bucket] >= MEMORY:
            tried[bucket] /= 2
            rights[bucket] /= 2
        tried[bucket] += 1
        rights[bucket] += right
        self._rows[support] = None
        if self.prior is not None:
            self.prior.learn(support, length, right)


def rising(sums: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The means that never fall and are nearest to sums / weights, by squares: neighbours that fall are pooled.

    ```
    sums (1, 6, 2) of weights (10, 10, 10)      .1 .6 .2      .1 .4 .4
    ```
    """
    pools: list[tuple[float, float, int]] = []
    for total, weight in zip(sums, weights, strict=True):
        count = 1
        while pools and pools[-1][0] * weight > total * pools[-1][1]:
            before, heavy, many = pools.pop()
            total, weight, count = total + before, weight + heavy, count + many
        pools.append((total, weight, count))
    return [total / weight for total, weight, count in pools for _ in range(count)]
