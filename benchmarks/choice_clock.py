"""Times what chooses trees among a draft's guesses, wherever it is called. Knows names of methods, no figures."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from medusa_spec.drafters import HeadsDrafter
from medusa_spec.drafters.choice import GrowthChoice, ProductChoice, TemplateChoice
from medusa_spec.tree import Candidates

CHOOSING = (
    *((owner, name) for owner in (GrowthChoice, ProductChoice, TemplateChoice) for name in ("take", "tree")),
    (HeadsDrafter, "fill"),
    (Candidates, "best"),
)
"""From logits to guesses or chances, from chances to nodes, from nodes to the tree; all of it within a draft."""


class ChoiceClock:
    """Adds up the seconds of these calls, each counted once where one calls another.

    Attributes:
        seconds: Since the last `lap`.
    """

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def lap(self) -> float:
        """The seconds so far, and starts anew."""
        found, self.seconds = self.seconds, 0.0
        return found

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, watched."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            began, self._depth = time.perf_counter(), self._depth + 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - began

        return watched

    @contextmanager
    def watching(self) -> Iterator["ChoiceClock"]:
        """Watches them as long as the context lasts."""
        plain = [(owner, name, owner.__dict__[name]) for owner, name in CHOOSING]
        for owner, name, function in plain:
            setattr(owner, name, self.timed(function))
        try:
            yield self
        finally:
            for owner, name, function in plain:
                setattr(owner, name, function)
