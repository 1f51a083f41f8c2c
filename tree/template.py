"""Static templates: trees written as rank paths, the same at every step. Knows ranks, not tokens."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from medusa_spec.tree.shape import TreeShape, shape_of

RankPath = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TreeTemplate:
    """A prefix-closed set of rank paths. Path (1, 0) is: head 1's second guess, then head 2's first.

    ```
    paths (0,) (0, 0) (1,)     root ─ (0,) ─ (0, 0)     ranks  of nodes 1..3: (0, 0, 1)
                               └───── (1,)              depths of nodes 1..3: (1, 2, 1)
    ```

    Attributes:
        paths: The paths in layout order: depth first, lower ranks first, so that the likeliest chain is contiguous
            after the root and keeping it copies nothing.
        shape: The tree of these paths; node i + 1 is `paths[i]`.

    Raises:
        ValueError: If a path is empty or double, a rank negative, or a prefix of a path missing (it is named).
    """

    paths: tuple[RankPath, ...]
    shape: TreeShape = field(init=False, compare=False)

    def __post_init__(self) -> None:
        paths = tuple(sorted(tuple(int(rank) for rank in path) for path in self.paths))
        node_of: dict[RankPath, int] = {(): 0}
        parents = [-1]
        for node, path in enumerate(paths, start=1):
            if not path or min(path) < 0:
                raise ValueError(f"paths must be non-empty tuples of ranks >= 0, got {path}")
            if path in node_of:
                raise ValueError(f"paths must be distinct, got {path} twice; remove one")
            if path[:-1] not in node_of:
                raise ValueError(
                    f"paths must hold every prefix of each path: {path} is there, {path[:-1]} is missing; add it"
                )
            node_of[path] = node
            parents.append(node_of[path[:-1]])
        object.__setattr__(self, "paths", paths)
        object.__setattr__(self, "shape", shape_of(tuple(parents)))

    @property
    def depth(self) -> int:
        """D, the length of the longest path: the number of heads that the template needs."""
        return self.shape.max_depth

    @property
    def width(self) -> int:
        """One more than the highest rank: how many guesses of a head the template needs."""
        return 1 + max((path[-1] for path in self.paths), default=-1)

    def slots(self) -> torch.Tensor:
        """For each draft node its place in a flattened [D, width] table of guesses.

        ```
        paths (0,) (0, 0) (1,), width 2:  head 1 [a b]  head 2 [c d]  ->  slots (0, 2, 1)  ->  tokens a c b
        ```

        Returns:
            Int64 tensor [N - 1].
        """
        width = self.width
        places = [(len(path) - 1) * width + path[-1] for path in self.paths]
        return torch.tensor(places, dtype=torch.long, device="cpu")

    def to_list(self) -> list[list[int]]:
        """The paths as nested lists, for JSON."""
        return [list(path) for path in self.paths]

    @classmethod
    def from_list(cls, paths: Iterable[Iterable[Any]]) -> "TreeTemplate":
        """The inverse of `to_list`."""
        return cls(paths=tuple(tuple(int(rank) for rank in path) for path in paths))


def chain_template(depth: int) -> TreeTemplate:
    """Every head's first guess.

    ```
    chain_template(2)          root ─ (0,) ─ (0, 0)
    ```
    """
    return TreeTemplate(paths=tuple((0,) * length for length in range(1, depth + 1)))
