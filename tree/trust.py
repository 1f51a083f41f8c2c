"""How far chances hold on the text at hand, learnt from what came true. Knows numbers only."""

from math import exp

CERTAIN = 2.0
"""What was believed at first weighs as much as outcomes of so much variance in all: 8 of an even chance."""

FORGET = 10.0
"""Variance of outcomes in all that counts at most, that of 40 of an even chance: texts change as they go on."""

FARTHEST = 3.0
"""Most that odds are moved by, as a logarithm: twentyfold."""


class Trust:
    """Moves the odds of chances so that they are frequencies.

    Heads were calibrated on texts of one kind; on others they guess better or worse than they say, all chances alike:

    ```
    said   .10 .30 .50 .80                   maths, odds x 1.8   .17 .44 .64 .88
                                       translations, odds x .25  .03 .10 .20 .50
    ```

    The logarithm of the factor is that of a logistic regression with nothing but a constant, learnt by one Newton step
    an outcome, which counts old ones less and less.

    Attributes:
        shift: Logarithm of the factor on odds; 0 at first.
    """

    def __init__(self) -> None:
        self.shift = 0.0
        self._seen = CERTAIN

    def chance(self, said: float) -> float:
        """What a chance is worth here; never falls with it."""
        if self.shift == 0.0 or not 0.0 < said < 1.0:
            return said
        return 1.0 / (1.0 + (1.0 - said) / said * exp(-self.shift))

    def learn(self, said: float, right: bool) -> None:
        """Is told whether a guess was right whose chance was said to be this."""
        chance = min(max(self.chance(said), 0.01), 0.99)  # one that was sure is not to count for nothing, or for all
        self._seen = min(self._seen + chance * (1.0 - chance), FORGET)
        self.shift = min(max(self.shift + (right - chance) / self._seen, -FARTHEST), FARTHEST)
