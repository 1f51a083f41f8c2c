"""What a rank path is worth: how often it was right, whole, on held-out data. Knows counts, not models."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from medusa_spec.tree.template import RankPath

PRIOR_WEIGHT = 8.0
"""Weight, in positions, of the product of single ranks beside the whole-path count."""


@dataclass(frozen=True, kw_only=True)
class PathValues:
    """Measured frequencies of rank paths.

    The value of a path is the frequency with which *all* its guesses were right at the same position. Heads are not
    independent (where the first is right the second is likelier to be), so products of single ranks mislead; they only
    serve as a prior worth `PRIOR_WEIGHT` positions, which counts where a path was seen rarely.

    ```
    100 positions, (0,) right 40 times, (0, 0) 20 times:
        root ─ (0,) .40 ─ (0, 0) .20          value = expected gain of the node = its share in μ
    ```

    Attributes:
        total: Number of positions counted.
        counts: For each path the number of positions at which it was right, whole.
        singles: Per head a tuple: how often the truth stood at rank 0, 1, ... R - 1, whatever the other heads said.
    """

    total: int
    counts: Mapping[RankPath, int]
    singles: tuple[tuple[int, ...], ...]
    _cache: dict[RankPath, float] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.total < 1:
            raise ValueError(
                f"total must be at least 1 counted position, got {self.total}; calibrate on data that is not empty"
            )
        if len({len(ranks) for ranks in self.singles}) > 1:
            raise ValueError(f"singles must count as many ranks for every head, got {[len(s) for s in self.singles]}")
        for count in (*self.counts.values(), *(count for ranks in self.singles for count in ranks)):
            if not 0 <= count <= self.total:
                raise ValueError(f"counts must be in 0..{self.total} (total), got {count}")

    @property
    def depth(self) -> int:
        """K, the number of heads counted."""
        return len(self.singles)

    @property
    def width(self) -> int:
        """R, the number of ranks counted per head."""
        return len(self.singles[0]) if self.singles else 0

    def up_to(self, depth: int) -> "PathValues":
        """What is known of paths of at most `depth` guesses: trees made from it are no deeper."""
        counts = {path: count for path, count in self.counts.items() if len(path) <= depth}
        return PathValues(total=self.total, counts=counts, singles=self.singles[:depth])

    def value(self, path: RankPath) -> float:
        """Probability that every guess on `path` is right; never more than that of its prefix."""
        if not path:
            return 1.0
        if path not in self._cache:
            self._cache[path] = self.value(path[:-1]) * self._conditional(path)
        return self._cache[path]

    def _conditional(self, path: RankPath) -> float:
        """P(last guess right | the ones before right), shrunk towards the single-rank frequency."""
        prior = self.singles[len(path) - 1][path[-1]] / self.total
        parent = self.total if len(path) == 1 else self.counts.get(path[:-1], 0)
        return (self.counts.get(path, 0) + PRIOR_WEIGHT * prior) / (parent + PRIOR_WEIGHT)


def count_paths(ranks: torch.Tensor, *, width: int) -> PathValues:
    """Counts rank paths on held-out positions.

    ```
    ranks [[0, 0], [0, 5], [1, 0]], width 4:   (0,) 2   (1,) 1   (0, 0) 1   (1, 0) 1     ((0, 5) lies outside)
    ```

    Args:
        ranks: Int tensor [T, K]: rank of the true token among head k's guesses at each position; a number outside
            0..width-1 says that the truth was not among the guesses counted.
        width: R, number of ranks counted.

    Raises:
        ValueError: If `ranks` is not of two dimensions or empty.
    """
    if ranks.ndim != 2 or ranks.shape[0] == 0:
        raise ValueError(f"ranks must be a non-empty [T, K] tensor, got shape {tuple(ranks.shape)}")
    counts: Counter[RankPath] = Counter()
    for row in ranks.tolist():
        for depth, rank in enumerate(row, start=1):
            if not 0 <= rank < width:
                break
            counts[tuple(row[:depth])] += 1
    singles = tuple(
        tuple(int((ranks[:, head] == rank).sum()) for rank in range(width)) for head in range(ranks.shape[1])
    )
    return PathValues(total=ranks.shape[0], counts=dict(counts), singles=singles)
