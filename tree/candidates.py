"""Nodes that a tree may take, from whoever proposes them, and the tree that pays best. Knows values and prices."""

from collections.abc import Sequence
from dataclasses import dataclass

from medusa_spec.tree.prices import Prices
from medusa_spec.tree.shape import TreeShape, shape_of


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The tree that came of candidates.

    Attributes:
        shape: The tree.
        tokens: Of its draft nodes, in layout order.
        expected: Draft tokens of it that will be accepted, as the values have it: their sum.
    """

    shape: TreeShape
    tokens: list[int]
    expected: float


class Candidates:
    """Nodes below a root, each with its value: the chance that all tokens up to it are right. The root is node 0.

    ```
    root's guesses .6 .3, the first one's .5 .1        value   1 ─ .6 ─ .3
                                                              │    └─── .06
                                                              └─ .3
    ```

    Attributes:
        parents: Of each node, -1 for the root.
        values: Of each node; they never rise along a path.
        tokens: Of each node, -1 for the root.
    """

    def __init__(self) -> None:
        self.parents: list[int] = [-1]
        self.values: list[float] = [1.0]
        self.tokens: list[int] = [-1]
        self._below: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int, chance: float) -> int:
        """A guess below a node; proposed a second time it is one node still, of the higher value.

        Args:
            parent: The node.
            token: Its token, as the caller numbers tokens.
            chance: That it is right if its parent is.

        Returns:
            Its number.
        """
        value = self.values[parent] * min(chance, 1.0)
        known = self._below.get((parent, token))
        if known is not None:
            self.values[known] = max(self.values[known], value)
            return known
        self.parents.append(parent)
        self.tokens.append(token)
        self.values.append(value)
        self._below[parent, token] = len(self.values) - 1
        return len(self.values) - 1

    def child(self, parent: int, token: int) -> int | None:
        """The node of a token below a node; None if nobody proposed it."""
        return self._below.get((parent, token))

    def graft(self, tokens: Sequence[int], chances: Sequence[float]) -> list[int]:
        """A path from the root, each token with the chance that it is right if those before are; its nodes."""
        path = [0]
        for token, chance in zip(tokens, chances, strict=True):
            path.append(self.add(path[-1], token, chance))
        return path[1:]

    def best(self, prices: Prices, limit: int | None = None) -> Chosen:
        """The tree that pays best among the nodes.

        Values never rise along a path, so the best nodes of any number are a tree: only their number is searched.

        Args:
            prices: What a tree of each size costs.
            limit: Most draft nodes; None leaves it to the prices.
        """
        most = prices.largest if limit is None else min(limit, prices.largest)
        # Equal values stay in the order in which they came, parents first.
        order = sorted(range(1, len(self.values)), key=lambda node: -self.values[node])[:most]
        best, count, gained, expected = 0.0, 0, 0.0, 0.0
        for place, node in enumerate(order, start=1):
            gained += self.values[node]
            if gained - prices.prices[place] > best:
                best, count, expected = gained - prices.prices[place], place, gained
        return self._laid_out(order[:count], expected)

    def _laid_out(self, nodes: list[int], expected: float) -> Chosen:
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
        return Chosen(shape=shape_of(tuple(parents)), tokens=tokens, expected=expected)
