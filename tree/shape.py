"""The shape of a draft tree: who is whose child. Knows no tokens, no probabilities, no model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from medusa_spec.tree.mask import ancestor_mask


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """A rooted tree as a tuple of parents, parents before children.

    ```
    parents (-1, 0, 1, 0)      0 ─ 1 ─ 2        depths   (0, 1, 2, 1)
                               └── 3            children ((1, 3), (2,), (), ())
    ```

    Attributes:
        parents: For each node the index of its parent; -1 for the root, which is node 0.
        depths: Distance from the root, the root's own being 0.
        children: For each node the indices of its children, in order.

    Raises:
        ValueError: If node 0 is not the only root, or a parent does not stand before its child.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...] = field(init=False, compare=False)
    children: tuple[tuple[int, ...], ...] = field(init=False, compare=False)
    mask: torch.Tensor = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise ValueError(
                f"parents must begin with -1, the mark of the root, got {self.parents[:4]}; put the root at index 0"
            )
        depths: list[int] = [0]
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"parents[{node}] must be in 0..{node - 1} (parents stand before children), "
                    f"got {parent}; sort the nodes by depth"
                )
            depths.append(depths[parent] + 1)
            children[parent].append(node)
        object.__setattr__(self, "depths", tuple(depths))
        object.__setattr__(self, "children", tuple(map(tuple, children)))
        object.__setattr__(self, "mask", ancestor_mask(self.parents))

    @property
    def size(self) -> int:
        """N, the number of nodes with the root."""
        return len(self.parents)

    @property
    def max_depth(self) -> int:
        """D, the depth of the deepest node; 0 for a lone root."""
        return max(self.depths)

    def path_to(self, node: int) -> tuple[int, ...]:
        """Node indices from the root to `node`, both included: for node 2 of the drawing (0, 1, 2)."""
        path = [node]
        while path[-1] != 0:
            path.append(self.parents[path[-1]])
        return tuple(reversed(path))

    def leaves(self) -> tuple[int, ...]:
        """Indices of the nodes without children: (2, 3) in the drawing."""
        return tuple(node for node, below in enumerate(self.children) if not below)


@lru_cache(maxsize=4096)
def shape_of(parents: tuple[int, ...]) -> TreeShape:
    """The shape with these parents, made once: drafters that grow a tree at every step meet the same shapes again.

    ```
    shape_of((-1, 0, 0))       0 ─ 1
                               └── 2
    ```
    """
    return TreeShape(parents=parents)


def chain(length: int) -> TreeShape:
    """A tree without branches, `length` draft nodes after the root.

    ```
    chain(3)                   0 ─ 1 ─ 2 ─ 3
    ```
    """
    if length < 0:
        raise ValueError(f"length must be 0 or more draft nodes, got {length}")
    return shape_of(tuple(range(-1, length)))


def merge_chains(chains: Iterable[Sequence[int]]) -> tuple[TreeShape, list[int]]:
    """Merges token chains that start after the root into one tree; common prefixes are stored once.

    ```
    [5 7 9] and [5 8]          root ─ 5 ─ 7 ─ 9       parents (-1, 0, 1, 2, 1)
                                      └── 8           tokens of the draft nodes [5, 7, 9, 8]
    ```

    Returns:
        The shape, and the tokens of nodes 1..N-1 in order. The first chain is laid out first and contiguously.
    """
    parents, tokens = [-1], []
    index: dict[tuple[int, int], int] = {}
    for tokens_of_chain in chains:
        node = 0
        for token in tokens_of_chain:
            child = index.get((node, token))
            if child is None:
                parents.append(node)
                tokens.append(token)
                child = index[node, token] = len(tokens)
            node = child
    return shape_of(tuple(parents)), tokens
