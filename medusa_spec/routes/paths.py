"""Route: every root-to-leaf path of a tree is a row of a batch. Knows no layers."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from medusa_spec.routes.levels import RowsRoute
from medusa_spec.routes.text_state import TextState
from medusa_spec.target_output import TargetOutput
from medusa_spec.tree import TreeShape


class PathsRoute(RowsRoute):
    """One pass over all paths, padded at their ends, where nothing that counts can see it.

    ```
    0 ─ 1 ─ 2        row 0:  0 1 2
    └── 3            row 1:  0 3 ·
    ```

    Then the state is that of a row whose whole path was accepted, or the accepted tokens are read again.
    """

    name: ClassVar[str] = "paths as batch rows"
    needs_proof: ClassVar[bool] = True

    def verify_text(
        self, state: TextState, tokens: torch.Tensor, shape: TreeShape, **wanted: Any
    ) -> tuple[TargetOutput, Any]:
        """See `RowsRoute`."""
        paths = [shape.path_to(leaf) for leaf in shape.leaves()]
        longest = max(map(len, paths))
        rows = state.rows([0] * len(paths))
        padded = torch.tensor([(*path, *path[-1:] * (longest - len(path))) for path in paths], device=tokens.device)
        out = rows.read(tokens[padded], **wanted)
        row_of = {node: row for row, path in reversed(list(enumerate(paths))) for node in path}

        def settle(path: Sequence[int]) -> TextState:
            if len(path) == longest:  # then it is one of the paths, and was not padded
                return rows if len(paths) == 1 else rows.rows([row_of[path[-1]]])
            again = state.rows([0])
            again.read(tokens[list(path)].unsqueeze(0), last_only=True)
            return again

        behind = out.logits.shape[1] - longest  # models that compute more than was asked for
        return out.at([row_of[node] for node in range(shape.size)], [behind + depth for depth in shape.depths]), settle
