"""A static template as levels, for heads that see the tokens before the one they guess. Knows ranks, no tokens."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from medusa_spec.tree import TreeTemplate


@dataclass(frozen=True, kw_only=True, eq=False)
class Level:
    """What is guessed below the nodes of one depth that have children.

    ```
    template (0,) (0, 0) (0, 1) (1,)      depth 0   slots (0, 1)      below the root: its guesses 0 and 1
                                          depth 1   slots (0, 1)      below (0,): guesses 0 and 1; kept (0,)
    ```

    Attributes:
        width: Guesses wanted of every node.
        slots: For each child its place in the flattened [M, width] table of guesses.
        kept: Which of the children have children themselves.
        parents: For each of those its parent's row among the M.
    """

    width: int
    slots: torch.Tensor
    kept: torch.Tensor
    parents: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A template as levels, and the order that brings their tokens into the template's layout."""

    levels: tuple[Level, ...]
    order: torch.Tensor


@lru_cache(maxsize=256)
def plan_of(template: TreeTemplate, device: torch.device) -> Plan:
    """The plan of a template, made once."""
    by_depth = [[path for path in template.paths if len(path) == depth + 1] for depth in range(template.depth)]
    inner = {path[:-1] for path in template.paths}
    levels: list[Level] = []
    rows: dict[tuple[int, ...], int] = {(): 0}
    for children in by_depth:
        width = 1 + max(path[-1] for path in children)
        kept = [place for place, path in enumerate(children) if path in inner]
        levels.append(
            Level(
                width=width,
                slots=_indices((rows[path[:-1]] * width + path[-1] for path in children), device),
                kept=_indices(kept, device),
                parents=_indices((rows[children[place][:-1]] for place in kept), device),
            )
        )
        rows = {children[place]: row for row, place in enumerate(kept)}
    listed = {path: place for place, path in enumerate(path for children in by_depth for path in children)}
    return Plan(levels=tuple(levels), order=_indices((listed[path] for path in template.paths), device))


def _indices(values: object, device: torch.device) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.long, device=device)  # type: ignore[call-overload]
