"""The slope of a line through points that come one by one, the last ones counting most. Knows numbers only."""

from dataclasses import dataclass

FORGET = 1 / 64
"""How fast points lose weight."""

LEAST = 8
"""Points below which no slope is told."""

SPREAD = 0.05
"""Least variance of x at which one is."""


@dataclass(kw_only=True)
class Slope:
    """Least squares over points whose weights decay.

    Attributes:
        points: How many there were.
    """

    points: int = 0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """Another point."""
        self.points += 1
        rate = max(FORGET, 1.0 / self.points)
        far_x, far_y = x - self._x, y - self._y
        self._x += rate * far_x
        self._y += rate * far_y
        self._xx = (1.0 - rate) * (self._xx + rate * far_x * far_x)
        self._xy = (1.0 - rate) * (self._xy + rate * far_x * far_y)

    @property
    def value(self) -> float | None:
        """The slope; None as long as there are few points, or all at one x."""
        return self._xy / self._xx if self.points >= LEAST and self._xx >= SPREAD else None
