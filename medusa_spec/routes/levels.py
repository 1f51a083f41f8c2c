"""Routes: a pass for each depth of a tree, or for each node. Exact by construction; knows no layers."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from medusa_spec.routes.base import Route
from medusa_spec.routes.rows_cache import RowsCache
from medusa_spec.routes.text_state import TextState
from medusa_spec.target_output import TargetOutput, joined
from medusa_spec.tree import TreeShape


class RowsRoute(Route):
    """What the routes that copy the model's own state have in common: texts are checked one after the other."""

    reads_in_parts: ClassVar[bool] = False

    def new_cache(self, batch: int = 1) -> RowsCache:
        """See `Route`."""
        return RowsCache(self.backbone, batch)

    def read(self, ids: torch.Tensor, cache: RowsCache, **wanted: Any) -> TargetOutput:
        """See `Route`."""
        whole = not wanted.get("last_only") or wanted.get("all_states")
        outs = [state.read(ids[row : row + 1], **wanted) for row, state in enumerate(cache.states)]
        return joined(outs if whole else [out.last() for out in outs], dim=0)

    def verify(self, ids: torch.Tensor, tree_pass: Any, **wanted: Any) -> TargetOutput:
        """See `Route`."""
        cache: RowsCache = tree_pass.cache
        only = bool(wanted.pop("last_only", False)) and not wanted.pop("all_states", False)
        wanted.pop("all_states", None)
        outs = []
        for row, part in tree_pass.parts.items():
            out, cache.settle[row] = self.verify_text(cache.states[row], ids[0, part], tree_pass.tree_of(row), **wanted)
            outs.append(out)
        out = joined(outs)
        return out.last() if only else out

    def verify_text(
        self, state: TextState, tokens: torch.Tensor, shape: TreeShape, **wanted: Any
    ) -> tuple[TargetOutput, Any]:
        """Logits, h and layers at the nodes of a tree behind one text, and how to settle on a path of it.

        Args:
            state: Of the text; it is left alone.
            tokens: Of the nodes [N].
            shape: The tree.
            **wanted: As in `Backbone.forward`.
        """
        raise NotImplementedError


class LevelsRoute(RowsRoute):
    """A pass of one token per row for each depth; the rows are the nodes of that depth.

    ```
    0 ─ 1 ─ 2        pass 1: row 0       pass 2: rows 1, 3 (copies of row 0)       pass 3: row 2 (a copy of row 1)
    └── 3
    ```

    For models whose passes over several tokens differ from passes over one, as kernels in chunks do.
    """

    name: ClassVar[str] = "levels as batch rows"

    def verify_text(
        self, state: TextState, tokens: torch.Tensor, shape: TreeShape, **wanted: Any
    ) -> tuple[TargetOutput, Any]:
        """See `RowsRoute`."""
        levels, states, outs = _levels(shape), list[TextState](), list[TargetOutput]()
        for depth, nodes in enumerate(levels):
            above = [levels[depth - 1].index(shape.parents[node]) for node in nodes] if depth else [0]
            states.append((states[-1] if depth else state).rows(above))
            outs.append(states[-1].read(tokens[nodes].unsqueeze(1), **wanted).last())

        def settle(path: Sequence[int]) -> TextState:
            depth = len(path) - 1
            row = levels[depth].index(path[-1])
            return states[depth] if len(levels[depth]) == 1 else states[depth].rows([row])

        flat = joined(outs, dim=0)
        order = {node: place for place, node in enumerate(node for nodes in levels for node in nodes)}
        return flat.at([order[node] for node in range(shape.size)], [0] * shape.size), settle


class NodesRoute(RowsRoute):
    """A pass of one token for each node: for models whose state cannot be held for several rows."""

    name: ClassVar[str] = "nodes one by one"
    failing_means: ClassVar[str] = " (it keeps a state that no copy of its cache holds)"

    def verify_text(
        self, state: TextState, tokens: torch.Tensor, shape: TreeShape, **wanted: Any
    ) -> tuple[TargetOutput, Any]:
        """See `RowsRoute`."""
        states, outs = list[TextState](), list[TargetOutput]()
        for node, parent in enumerate(shape.parents):
            states.append((states[parent] if node else state).rows([0]))
            outs.append(states[node].read(tokens[None, node : node + 1], **wanted).last())
        return joined(outs), lambda path: states[path[-1]]


def _levels(shape: TreeShape) -> list[list[int]]:
    """Nodes by depth."""
    levels: list[list[int]] = [[] for _ in range(shape.max_depth + 1)]
    for node, depth in enumerate(shape.depths):
        levels[depth].append(node)
    return levels
