"""The best static tree of every size. Knows values of rank paths, nothing of time or models."""

import heapq
from itertools import accumulate

from medusa_spec.tree.template import RankPath, TreeTemplate
from medusa_spec.tree.values import PathValues


def nested_order(values: PathValues, size: int) -> list[RankPath]:
    """Rank paths in the order in which they should join a tree.

    Values fall along a path, so the best remaining node always hangs on the tree that is there: taking it, greedily,
    gives the tree with the largest sum of values for *every* size at once (parallel heads, whose guesses do not depend
    on the branch).

    ```
    values (0,) .4   (1,) .2   (0, 0) .25   (0, 1) .1   ->   (0,) (0, 0) (1,) (0, 1)
    ```

    Args:
        values: Counted frequencies.
        size: Number of draft nodes wanted, the root not counted.

    Returns:
        At most `size` paths; fewer only if all paths of `values` are exhausted.
    """
    if size < 0:
        raise ValueError(f"size must be 0 or more draft nodes, got {size}")
    order: list[RankPath] = []
    # Ties go to the shallower path, then to the lower ranks: a fixed order, and never a child before its parent.
    frontier: list[tuple[float, int, RankPath]] = []

    def open_children(path: RankPath) -> None:
        if len(path) < values.depth:
            for rank in range(values.width):
                child = (*path, rank)
                heapq.heappush(frontier, (-values.value(child), len(child), child))

    open_children(())
    while frontier and len(order) < size:
        path = heapq.heappop(frontier)[2]
        order.append(path)
        open_children(path)
    return order


def best_tree(values: PathValues, size: int) -> TreeTemplate:
    """The template of `size` draft nodes with the largest expected number of accepted ones.

    ```
    values (0,) .4   (1,) .2   (0, 0) .25, size 2      root ─ (0,) ─ (0, 0)       μ = .65
    ```
    """
    return TreeTemplate(paths=tuple(nested_order(values, size)))


def expected_accepted(values: PathValues, size: int) -> list[float]:
    """Expected μ of the best tree of 0, 1, ... `size` draft nodes: the running sum of the values in nested order.

    ```
    values (0,) .4   (1,) .2   (0, 0) .25      ->      [0, .4, .65, .85]
    ```
    """
    gains = [values.value(path) for path in nested_order(values, size)]
    return list(accumulate(gains, initial=0.0))
