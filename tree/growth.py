"""Dynamic trees: grown level by level from a step's own probabilities. Knows numbers, no tokens' meaning, no models."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from typing import Any

from medusa_spec.tree.candidates import Candidates, Chosen
from medusa_spec.tree.prices import Prices


@dataclass(frozen=True, kw_only=True)
class Growth(Prices):
    """How trees grow: what nodes cost, and how far to trust a draft's probabilities.

    A node is worth its place if the tokens that it is expected to gain are worth the time that it costs, at the price
    of `token_seconds` a token.

    Attributes:
        token_seconds: See `Prices`, and so are the next two.
        level_seconds: Time of one more level of the draft.
        pass_seconds: T(N).
        hit: Mean chance that the first guess below a right node is right.
        temperature: Draft logits are divided by it, so that probabilities are frequencies.
        coverage: Share of the target's tokens that are in the draft vocabulary.
        beam: Most nodes of a level that get children.
        width: Most children of a node.

    Raises:
        ValueError: If a number is out of range, naming it.
    """

    hit: float = 0.5
    temperature: float = 1.0
    coverage: float = 1.0
    beam: int = 4
    width: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.temperature < inf:
            raise ValueError(f"temperature must be above 0, got {self.temperature}")
        for name in ("hit", "coverage"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in 0..1 and above 0, got {getattr(self, name)}")
        for name in ("beam", "width"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an integer of 1 or more, got {value!r}")

    def priced(self, prices: Prices) -> "Growth":
        """The same rules at other prices."""
        given = {field.name: getattr(prices, field.name) for field in fields(Prices)}
        return replace(self, **given)

    def to_dict(self) -> dict[str, Any]:
        """As plain types, for JSON."""
        return asdict(self) | {"pass_seconds": [list(pair) for pair in self.pass_seconds]}


class Growing:
    """One tree while it grows, level by level.

    Args:
        growth: The rules.
        limit: Most draft nodes; None leaves it to the rules.
        candidates: Nodes that others have proposed already; None begins with the root alone.
        hit: The rules' `hit` as it is on the text at hand; None for theirs.

    Attributes:
        candidates: Its nodes.
    """

    def __init__(
        self,
        growth: Growth,
        limit: int | None = None,
        candidates: Candidates | None = None,
        *,
        hit: float | None = None,
    ) -> None:
        self.growth, self.hit = growth, growth.hit if hit is None else hit
        self.limit = growth.largest if limit is None else min(limit, growth.largest)
        self.candidates = Candidates() if candidates is None else candidates

    def add(self, parents: Sequence[int], tokens: Sequence[int], chances: Sequence[float]) -> list[int]:
        """Adds guesses below nodes, and says which of them should get children of their own.

        Args:
            parents: Node below which each guess stands.
            tokens: The guesses, as the caller numbers them.
            chances: Chance of each that it is right if its parent is.

        Returns:
            Nodes to guess below next, the likeliest first; none if another level would not pay.
        """
        growth, price, values, fresh = self.growth, self.growth.node_price, self.candidates.values, list[int]()
        for parent, token, chance in zip(parents, tokens, chances, strict=True):
            if values[parent] * chance >= price:
                fresh.append(self.candidates.add(parent, token, chance))
        fresh.sort(key=lambda node: -values[node])
        wanted = [node for node in fresh[: growth.beam] if values[node] * self.hit >= price]
        gain = sum(values[node] * self.hit - price for node in wanted)  # a child costs its place in the pass, too
        return wanted if gain > growth.level_seconds / growth.token_seconds else []

    def finish(self) -> Chosen:
        """The tree that pays best among the nodes."""
        return self.candidates.best(self.growth, self.limit)
