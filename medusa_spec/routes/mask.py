"""Route: the tree as an additive mask of four dimensions, handed to the model's own attention. Knows no attention."""

from typing import Any, ClassVar

import torch

from medusa_spec.attention import TreePass
from medusa_spec.errors import UnsupportedError
from medusa_spec.routes.attention import AttentionRoute
from medusa_spec.routes.base import Route
from medusa_spec.target_output import TargetOutput


class MaskRoute(AttentionRoute):
    """One pass under a mask [B, 1, N, S] that says which of the S keys in the cache each node sees.

    Hugging Face models hand such a mask on to their attention untouched; several kinds of layers get one each, by name.
    Models that work out more from the mask than who sees whom (positions, biases) fail the probe.
    """

    name: ClassVar[str] = "4-D mask"
    reads_chains: ClassVar[bool] = False
    needs_proof: ClassVar[bool] = True

    def enter(self) -> None:
        """See `Route`."""
        Route.enter(self)

    def verify(self, ids: torch.Tensor, tree_pass: Any, **wanted: Any) -> TargetOutput:
        """See `Route`.

        Raises:
            UnsupportedError: If the pass is not a `TreePass`.
        """
        if not isinstance(tree_pass, TreePass):
            raise UnsupportedError(f"a {type(tree_pass).__name__} cannot be verified by a mask; use a TreePass")
        return self.backbone.forward(
            ids,
            position_ids=tree_pass.positions,
            attention_mask=self._masks(tree_pass),
            cache=tree_pass.cache,
            **wanted,
        )

    def _masks(self, tree_pass: TreePass) -> Any:
        """One mask, or one for each kind of layer where their windows differ."""
        cache = tree_pass.cache
        kinds = getattr(self.backbone.config, "layer_types", None) or ["full_attention"] * len(cache.layers)
        masks = {}
        for layer, kind in enumerate(kinds):
            if kind not in masks:
                masks[kind] = tree_mask(tree_pass, layer, self.backbone.dtype)
        return masks if len(masks) > 1 else next(iter(masks.values()))


def tree_mask(tree_pass: TreePass, layer: int, dtype: torch.dtype) -> torch.Tensor:
    """What the nodes see of the keys that a layer's cache hands out, as 0 and the least number: [B, 1, N, S]."""
    rows = [tree_pass.visible(layer, row) for row in range(len(tree_pass.lengths))]
    nodes = tree_pass.shape.size
    slots = max(seen.end for seen in rows) + nodes
    mask = torch.full((len(rows), 1, nodes, slots), torch.finfo(dtype).min, dtype=dtype)
    for row, seen in enumerate(rows):
        boundary = seen.common - seen.first
        near = seen.mask.to(mask.device)
        mask[row, 0, :, seen.common : seen.end] = 0
        mask[row, 0, :, seen.first : seen.common].masked_fill_(near[:, :boundary], 0)
        mask[row, 0, :, seen.end : seen.end + nodes].masked_fill_(near[:, boundary:], 0)
    return mask.to(tree_pass.device)
