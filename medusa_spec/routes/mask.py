"""Route: the tree as an additive mask of four dimensions, handed to the model's own attention. Knows no attention."""

from typing import Any, ClassVar

import torch

from medusa_spec.attention import TreePass
from medusa_spec.errors import UnsupportedError
from medusa_spec.routes.attention import AttentionRoute
from medusa_spec.routes.base import Route
from medusa_spec.target_output import TargetOutput, joined


class MaskRoute(AttentionRoute):
    """One pass under a mask [1, 1, N, S] that says which of the S keys in the cache each node sees.

    Hugging Face models hand such a mask on to their attention untouched; several kinds of layers get one each, by name.
    Models that work out more from the mask than who sees whom (positions, biases) fail the probe.
    """

    name: ClassVar[str] = "4-D mask"
    reads_chains: ClassVar[bool] = False
    needs_proof: ClassVar[bool] = True
    collects: ClassVar[bool] = False

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
        cache, outs = tree_pass.cache, list[TargetOutput]()
        if len(cache.lengths) == 1:
            return self._pass(ids, tree_pass, **wanted)
        for row, part in tree_pass.parts.items():  # the model's own attention knows no rows side by side
            with cache.only(row) as own:
                own.make_room(part.stop - part.start)
                alone = TreePass(shape=tree_pass.tree_of(row), cache=own, device=tree_pass.device)
                outs.append(self._pass(ids[:, part], alone, **wanted))
        return joined(outs)

    def _pass(self, ids: torch.Tensor, tree_pass: TreePass, **wanted: Any) -> TargetOutput:
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
    """What the nodes of one row see of the keys that a layer's cache hands out, as 0 and the least number [1, 1, N, S].

    Args:
        tree_pass: Of one row.
        layer: Number of the layer.
        dtype: Of the mask.
    """
    seen = tree_pass.visible(layer, 0)
    nodes, boundary, near = seen.mask.shape[0], seen.common - seen.first, seen.mask
    mask = torch.full((1, 1, nodes, seen.end + nodes), torch.finfo(dtype).min, dtype=dtype, device=near.device)
    mask[..., seen.common : seen.end] = 0
    mask[0, 0, :, seen.first : seen.common].masked_fill_(near[:, :boundary], 0)
    mask[0, 0, :, seen.end :].masked_fill_(near[:, boundary:], 0)
    return mask.to(tree_pass.device)
