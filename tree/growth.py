"""Dynamic trees: grown level by level from a step's own probabilities. Knows numbers, no tokens' meaning, no models."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import inf
from typing import Any

from medusa_spec.tree.shape import TreeShape, shape_of


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How trees grow: what nodes cost, and how far to trust a draft's probabilities.

    A node is worth its place if the tokens that it is expected to gain are worth the time that it costs, at the price
    of `token_seconds` a token.

    Attributes:
        token_seconds: What a token costs with drafts of this kind; the price at which gains are weighed.
        level_seconds: Time of one more level of the draft.
        pass_seconds: Time of a verify pass by N, measured sizes as (N, seconds), N rising; between them it is linear.
        hit: Mean chance that the first guess below a right node is right.
        temperature: Draft logits are divided by it, so that probabilities are frequencies.
        coverage: Share of the target's tokens that are in the draft vocabulary.
        beam: Most nodes of a level that get children.
        width: Most children of a node.

    Raises:
        ValueError: If a number is out of range, naming it.
    """

    token_seconds: float
    level_seconds: float
    pass_seconds: tuple[tuple[int, float], ...]
    hit: float = 0.5
    temperature: float = 1.0
    coverage: float = 1.0
    beam: int = 4
    width: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "pass_seconds", tuple((size, float(seconds)) for size, seconds in self.pass_seconds))
        for name in ("token_seconds", "temperature"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.level_seconds < inf:
            raise ValueError(f"level_seconds must be 0 or more, got {self.level_seconds}")
        for name in ("hit", "coverage"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in 0..1 and above 0, got {getattr(self, name)}")
        for name in ("beam", "width"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an integer of 1 or more, got {value!r}")
        sizes = [size for size, _ in self.pass_seconds]
        if len(sizes) < 2 or sizes != sorted(set(sizes)) or sizes[0] != 1 or {*map(type, sizes)} != {int}:
            raise ValueError(f"pass_seconds must hold two or more sizes N, rising from 1, got {sizes}")
        if not all(0 < seconds < inf for _, seconds in self.pass_seconds):
            raise ValueError(
                f"pass_seconds must hold times above 0, got {[seconds for _, seconds in self.pass_seconds]}"
            )

    def seconds(self, size: int) -> float:
        """T(N), linear between the measured sizes and beyond the last."""
        sizes = [known for known, _ in self.pass_seconds]
        right = min(max(1, bisect_left(sizes, size)), len(sizes) - 1)
        (low, start), (high, stop) = self.pass_seconds[right - 1 : right + 1]
        return start + (stop - start) * (size - low) / (high - low)

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

    def to_dict(self) -> dict[str, Any]:
        """As plain types, for JSON."""
        return asdict(self) | {"pass_seconds": [list(pair) for pair in self.pass_seconds]}


class Growing:
    """One tree while it grows. Nodes are numbered as they come; the root is 0.

    ```
    root's guesses .6 .3, the first one's .5 .1        value   1 ─ .6 ─ .3         a node's value is the chance
                                                              │    └─── .06        that all guesses up to it are right
                                                              └─ .3
    ```

    Args:
        growth: The rules.
        limit: Most draft nodes; None leaves it to the rules.
    """

    def __init__(self, growth: Growth, limit: int | None = None) -> None:
        self.growth = growth
        self.limit = growth.largest if limit is None else min(limit, growth.largest)
        self.parents: list[int] = [-1]
        self.values: list[float] = [1.0]
        self.tokens: list[int] = [-1]

    def add(self, parents: Sequence[int], tokens: Sequence[int], chances: Sequence[float]) -> list[int]:
        """Adds guesses below nodes, and says which of them should get children of their own.

        Args:
            parents: Node below which each guess stands.
            tokens: The guesses, as the caller numbers them.
            chances: Chance of each that it is right if its parent is.

        Returns:
            Nodes to guess below next, the likeliest first; none if another level would not pay.
        """
        growth, price, fresh = self.growth, self.growth.node_price, list[int]()
        for parent, token, chance in zip(parents, tokens, chances, strict=True):
            value = self.values[parent] * chance
            if value < price:
                continue
            self.parents.append(parent)
            self.tokens.append(token)
            self.values.append(value)
            fresh.append(len(self.values) - 1)
        fresh.sort(key=lambda node: -self.values[node])
        wanted = [node for node in fresh[: growth.beam] if self.values[node] * growth.hit >= price]
        gain = sum(self.values[node] for node in wanted) * growth.hit
        return wanted if gain > growth.level_seconds / growth.token_seconds else []

    def finish(self) -> tuple[TreeShape, list[int]]:
        """The tree that pays best among the nodes, and the tokens of its draft nodes in layout order.

        Values fall along a path, so the best nodes of any number are a tree: only their number is searched.
        """
        # Equal values stay in the order in which they came, parents first.
        order = sorted(range(1, len(self.values)), key=lambda node: -self.values[node])[: self.limit]
        best, count, gained = 0.0, 0, 0.0
        for place, node in enumerate(order, start=1):
            gained += self.values[node]
            if gained - self.growth.prices[place] > best:
                best, count = gained - self.growth.prices[place], place
        return self._laid_out(order[:count])

    def _laid_out(self, nodes: list[int]) -> tuple[TreeShape, list[int]]:
        """Depth first, the likeliest child first, so that the likeliest chain lies contiguous behind the root."""
        below: dict[int, list[int]] = {}
        for node in reversed(nodes):  # likeliest last: it leaves the stack first
            below.setdefault(self.parents[node], []).append(node)
        parents, tokens, stack = [-1], list[int](), [(node, 0) for node in below.get(0, ())]
        while stack:
            node, parent = stack.pop()
            parents.append(parent)
            tokens.append(self.tokens[node])
            stack += [(child, len(tokens)) for child in below.get(node, ())]
        return shape_of(tuple(parents)), tokens
