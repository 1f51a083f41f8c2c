"""Fused heads: one decoder layer over h, tapped layers and drafted tokens, added up. Know tensors, not the model."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from medusa_spec.heads.autoregressive import AutoregressiveHead, AutoregressiveHeads, StepParts
from medusa_spec.heads.config import HeadsConfig
from medusa_spec.heads.draft_layer import DraftLayer
from medusa_spec.heads.norm import unit_scale
from medusa_spec.heads.projection import Projection
from medusa_spec.heads.sizes import TapOptions


@dataclass(frozen=True, kw_only=True)
class FusedOptions(TapOptions):
    """What fused heads can be told.

    Attributes:
        tied: One layer for all depths; otherwise one for each.
    """

    tied: bool = True


class FusedHead(AutoregressiveHead):
    """One step: all that is known is added to the feature before a decoder layer reads it.

    ```
    feature of the text = h + V [low, middle, high]      x = feature + W [norm(e(token)), norm(feature)]
    next feature = layer(x)                              the LM head reads the next feature
    ```

    V and W start at zero and the layer as the identity, so that a fresh head is the target's own LM head. The token
    joins the residual stream itself, as in EAGLE-1; where attention alone reads it, as in EAGLE-3, a row must first
    learn to look at itself, which a short training does slowly.

    Args:
        config: Sizes.
        projection: The target's LM head.
        options: The layer's sizes, and the taps.
        begins: Whether drafts begin with this step: it alone has V.
    """

    def __init__(
        self, config: HeadsConfig, projection: Projection, options: FusedOptions, *, begins: bool = True
    ) -> None:
        super().__init__(config, projection)
        hidden, sizes = config.hidden_size, options.filled(config.hidden_size)
        eps, taps = float(sizes.rms_norm_eps or 0.0), len(options.layers)
        if taps and begins:
            self.fuse = nn.Linear(taps * hidden, hidden, bias=False)
            nn.init.zeros_(self.fuse.weight)
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        nn.init.zeros_(self.join.weight)
        self.token_norm = nn.RMSNorm(hidden, eps=eps)
        self.feature_norm = nn.RMSNorm(hidden, eps=eps)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.layer = DraftLayer(hidden, sizes)

    def begin(self, h: torch.Tensor, layers: torch.Tensor | None) -> torch.Tensor:
        """h, moved by the tapped layers [..., L, H], each brought to a root mean square of one: they differ tenfold."""
        if not hasattr(self, "fuse"):
            return h
        if layers is None:
            raise ValueError("layers must be given to fused heads that tap some, got none")
        return h + self.fuse(unit_scale(layers).flatten(-2))

    def parts(self) -> StepParts:
        """See `AutoregressiveHead`."""
        return StepParts(
            layer=self.layer,
            join=self.join,
            vector_norm=self.token_norm,
            feature_norm=self.feature_norm,
            added=True,
            input_norm=self.input_layernorm,
        )

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """The LM head reads the feature itself."""
        return x


class FusedHeads(AutoregressiveHeads):
    """K steps of one layer, or of a layer each.

    This library's own: EAGLE-1's joined token and feature (Li et al. 2024) and EAGLE-3's tapped layers and training
    through several steps (Li et al. 2025) in a residual stream that begins as h.
    """

    Options = FusedOptions
    mimics = True

    @classmethod
    def taps_of(cls, options: Any) -> tuple[int, ...]:
        """See `DraftHeads`."""
        return options.layers

    def make_head(self, k: int) -> Any:
        """All steps are alike, but that the first one fuses the taps."""
        return FusedHead(self.config, self.projection, self.options, begins=k == 0)
