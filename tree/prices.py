"""What the nodes and levels of a draft cost, in tokens. Knows times and sizes, no trees and no models."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Times of this machine, and the price at which tokens are weighed against them.

    Attributes:
        token_seconds: What a token costs with drafts of this kind; the price at which gains are weighed.
        level_seconds: Time of one more level of the draft.
        pass_seconds: Time of a verify pass by N, measured sizes as (N, seconds), N rising; between them it is linear.

    Raises:
        ValueError: If a number is out of range, naming it.
    """

    token_seconds: float
    level_seconds: float
    pass_seconds: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "pass_seconds", tuple((size, float(seconds)) for size, seconds in self.pass_seconds))
        if not 0 < self.token_seconds < inf:
            raise ValueError(f"token_seconds must be above 0, got {self.token_seconds}")
        if not 0 <= self.level_seconds < inf:
            raise ValueError(f"level_seconds must be 0 or more, got {self.level_seconds}")
        sizes = [size for size, _ in self.pass_seconds]
        if len(sizes) < 2 or sizes != sorted(set(sizes)) or sizes[0] != 1 or {*map(type, sizes)} != {int}:
            raise ValueError(f"pass_seconds must hold two or more sizes N, rising from 1, got {sizes}")
        if not all(0 < seconds < inf for _, seconds in self.pass_seconds):
            raise ValueError(
                f"pass_seconds must hold times above 0, got {[seconds for _, seconds in self.pass_seconds]}"
            )

    def seconds(self, size: int) -> float:
        """T(N), see `interpolate`."""
        return interpolate(self.pass_seconds, size)

    @property
    def largest(self) -> int:
        """Most draft nodes: the largest measured pass."""
        return self.pass_seconds[-1][0] - 1

    @cached_property
    def node_price(self) -> float:
        """Tokens that a node costs at least: its share of a pass of the size at which nodes are cheapest."""
        start = self.pass_seconds[0][1]
        shares = [(seconds - start) / (size - 1) for size, seconds in self.pass_seconds[1:]]
        return max(0.0, min(shares)) / self.token_seconds

    @cached_property
    def prices(self) -> tuple[float, ...]:
        """Tokens that 0, 1, 2, … draft nodes cost, up to the largest tree."""
        return tuple(
            (self.seconds(nodes + 1) - self.seconds(1)) / self.token_seconds for nodes in range(self.largest + 1)
        )


def interpolate(points: Sequence[tuple[int, float]], size: int) -> float:
    """T(N) between measured sizes, linearly; beyond the last one it goes on with the last slope, if that rises.

    Args:
        points: (N, seconds), one or more, N rising.
        size: N; below the first it costs what the first does.
    """
    right = min(bisect_left(points, size, key=lambda point: point[0]), len(points) - 1)
    if right == 0:
        return points[0][1]
    (low, start), (high, stop) = points[right - 1 : right + 1]
    rise = stop - start
    return stop + (max(0.0, rise) if size > high else rise) * (size - high) / (high - low)
