"""How far chances hold on the text at hand, learnt from what came true. Knows numbers only."""

from collections.abc import Sequence
from math import exp

CERTAIN = 2.0
"""What was believed at first weighs as much as outcomes of so much variance in all: 8 of an even chance."""

FORGET = 10.0
"""Variance of outcomes in all that counts at most, that of 40 of an even chance: texts change as they go on."""

FARTHEST = 3.0
"""Most that odds are moved by, as a logarithm: twentyfold."""


class Trust:
    """Moves the odds of first guesses so that they are frequencies.

    Heads were calibrated on texts of one kind; on others their first guesses are right more or less often than they
    say. The others are right as often as they say on all kinds that were tried, so they stay as far as the first leaves
    room: one of a place is right at most.

    ```
    said .48 .20 .12        maths, odds of the first x 1.8           .62 .20 .12
                            almost always right, odds x 12           .92 .05 .03
    ```

    The logarithm of the factor is that of a logistic regression with nothing but a constant, learnt by one Newton step
    an outcome, which counts old ones less and less.

    Attributes:
        shift: Logarithm of the factor on odds; 0 at first.
    """

    def __init__(self) -> None:
        self.shift = 0.0
        self._seen = CERTAIN

    def first(self, said: float) -> float:
        """What the chance of a first guess is worth here; never falls with it."""
        if self.shift == 0.0 or not 0.0 < said < 1.0:
            return said
        return 1.0 / (1.0 + (1.0 - said) / said * exp(-self.shift))

    def all(self, said: Sequence[float]) -> list[float]:
        """What the chances of a place's guesses are worth, the likeliest first; no more than 1 in all."""
        if self.shift == 0.0 or not said or not said[0] < 1.0:
            return list(said)
        first, others = self.first(said[0]), sum(said[1:])
        share = min(1.0, (1.0 - first) / others) if others else 1.0
        return [first, *(min(share * chance, first) for chance in said[1:])]

    def learn(self, said: float, right: bool) -> None:
        """Is told whether a first guess was right whose chance was said to be this; nan teaches nothing."""
        if not 0.0 <= said <= 1.0:
            return
        chance = min(max(self.first(said), 0.01), 0.99)  # one that was sure is not to count for nothing, or for all
        self._seen = min(self._seen + chance * (1.0 - chance), FORGET)
        self.shift = min(max(self.shift + (right - chance) / self._seen, -FARTHEST), FARTHEST)
