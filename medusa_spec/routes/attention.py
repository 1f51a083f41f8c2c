"""Route: the tree reaches every layer through transformers' attention interface. Knows no kernels."""

from typing import Any, ClassVar

import torch

from medusa_spec.cache import SlabCache
from medusa_spec.delegation import TREE_ARGUMENT, Pass
from medusa_spec.errors import UnsupportedError
from medusa_spec.routes.base import Route
from medusa_spec.target_output import TargetOutput


class AttentionRoute(Route):
    """One pass whose attention layers are told the tree by a keyword argument; see `delegation`."""

    name: ClassVar[str] = "attention interface"
    reads_chains: ClassVar[bool] = True
    collects: ClassVar[bool] = True

    def enter(self) -> None:
        """See `Route`."""
        self.backbone.attach_attention()

    def check(self) -> None:
        """See `Route`."""
        if not self.backbone.takes_positions:
            raise UnsupportedError(
                f"{type(self.backbone.model).__name__}.forward takes no position_ids, which a tree needs (its nodes' "
                "positions are not their places in the row)"
            )

    def new_cache(self, batch: int = 1) -> SlabCache:
        """See `Route`."""
        return SlabCache(self.backbone.config, batch=batch)

    def read(self, ids: torch.Tensor, cache: SlabCache, **wanted: Any) -> TargetOutput:
        """See `Route`."""
        past = cache.get_seq_length()
        positions = torch.arange(past, past + ids.shape[1], device=self.backbone.device).unsqueeze(0)
        if self.backbone.takes_positions:
            wanted["position_ids"] = positions
        return self.backbone.forward(ids, cache=cache, **wanted)

    def verify(self, ids: torch.Tensor, tree_pass: Pass, **wanted: Any) -> TargetOutput:
        """See `Route`."""
        extra: dict[str, Any] = {TREE_ARGUMENT: tree_pass}
        return self.backbone.forward(
            ids,
            position_ids=tree_pass.positions,
            # Four dimensions: Hugging Face passes such a mask through untouched, and tree attention does not read it.
            attention_mask=tree_pass.no_mask,
            cache=tree_pass.cache,
            **wanted,
            **extra,
        )
