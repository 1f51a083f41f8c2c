"""Dynamic trees of heads that guess all depths at once, whatever the branch. Knows chances and prices, no tokens'
meaning."""

import heapq
from collections.abc import Sequence
from itertools import count

from medusa_spec.tree.candidates import Candidates


def open_product(
    candidates: Candidates,
    tokens: Sequence[Sequence[int]],
    chances: Sequence[Sequence[float]],
    *,
    price: float,
    limit: int,
) -> None:
    """Adds the nodes of highest value to candidates: parallel heads make the same guesses below every node of a depth.

    A node's value is the product of the chances along its path. It rises neither along a path nor from a guess to the
    next likely one, so a heap meets the nodes in order of value, each once, and only those that are taken are made.

    ```
    head 1 guesses 5 7 at .6 .3, head 2 guesses 8 at .5          1 ─ .6 (5) ─ .30 (8)        opened in the order
    price .2                                                     └── .3 (7) ─ .15 (8)        5, 5 8, 7; not 7 8
    ```

    Args:
        candidates: Is added to; below nodes that others have proposed, too: a head says what stands at its depth.
        tokens: [K][W], each head's guesses, the likeliest first; no two of a head are the same.
        chances: [K][W], of each that it is right if those before it are.
        price: Value below which no node is opened; see `Prices.node_price`.
        limit: Most nodes opened.
    """
    values, order, known = candidates.values, count(), len(candidates.values)
    frontier: list[tuple[float, int, int, int, int]] = []

    def offer(parent: int, depth: int, rank: int) -> None:
        if depth < len(chances) and rank < len(chances[depth]):
            value = values[parent] * chances[depth][rank]
            if value >= price:
                # Equal values in the order in which they were offered: a fixed one.
                heapq.heappush(frontier, (-value, next(order), parent, depth, rank))

    depths = [0]
    for parent in candidates.parents[1:]:
        depths.append(depths[parent] + 1)
    for node, depth in enumerate(depths):
        offer(node, depth, 0)
    for _ in range(limit):
        if not frontier:
            break
        _, _, parent, depth, rank = heapq.heappop(frontier)
        node = candidates.add(parent, tokens[depth][rank], chances[depth][rank])
        if node >= known:
            offer(node, depth + 1, 0)
        offer(parent, depth, rank + 1)
