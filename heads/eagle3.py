"""EAGLE-3 heads: one decoder layer over fused layers of the target. Knows tensors, not the model."""

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
class Eagle3Options(TapOptions):
    """What EAGLE-3 heads can be told.

    Attributes:
        tied: One layer for all depths, as published; otherwise one for each.
        from_h: Features are h, moved by what is fused of the tapped layers, each at a root mean square of one (they
            differ tenfold), and the LM head reads them as they are. Published heads fuse the layers alone and have a
            norm before an LM head of their own; before the target's that norm must first grow to the size of h, which
            takes a short training longer than all the rest.
        norm_before_residual: The residual stream begins with the feature's norm, as some published heads were
            trained; otherwise with the feature itself.
    """

    tied: bool = True
    from_h: bool = True
    norm_before_residual: bool = False


class Eagle3Head(AutoregressiveHead):
    """One step: attention reads the norms of token and feature side by side; the feature is the residual stream.

    ```
    feature of the text = h + W [low, middle, high]      x = feature + o(attention([norm(e(token)), norm(feature)]))
    next feature = x + mlp(norm(x))                      the LM head reads the next feature
    ```

    W starts at zero and the layer as the identity: a fresh head is the target's own LM head. Without `from_h` the
    feature of the text is W [low, middle, high], which starts as their mean, and the LM head reads the feature's norm.

    Args:
        config: Sizes.
        projection: The target's LM head.
        options: The layer's sizes, and the taps.
        joins: Whether drafts begin with this step: it alone has W.
    """

    def __init__(
        self, config: HeadsConfig, projection: Projection, options: Eagle3Options, *, joins: bool = True
    ) -> None:
        super().__init__(config, projection)
        hidden, sizes = config.hidden_size, options.filled(config.hidden_size)
        eps, taps = float(sizes.rms_norm_eps or 0.0), max(1, len(options.layers))
        self.taps, self.from_h = len(options.layers), options.from_h
        self.norm_before_residual = options.norm_before_residual
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.layer = DraftLayer(hidden, sizes, inputs=2 * hidden)
        self.norm = nn.Identity() if options.from_h else nn.RMSNorm(hidden, eps=eps)
        if joins:
            self.fc = nn.Linear(taps * hidden, hidden, bias=False)
            with torch.no_grad():
                self.fc.weight.copy_(torch.eye(hidden).repeat(1, taps) * (0.0 if options.from_h else 1.0 / taps))

    def begin(self, h: torch.Tensor, layers: torch.Tensor | None) -> torch.Tensor:
        """The fused layers [..., L, H], with h where features are to be it; without taps h stands for them."""
        if self.taps and layers is None:
            raise ValueError("layers must be given to EAGLE-3 heads that tap some, got none")
        read = h.unsqueeze(-2) if layers is None or not self.taps else layers
        if not self.from_h:
            return self.fc(read.flatten(-2))
        return h + self.fc(unit_scale(read).flatten(-2))

    def parts(self) -> StepParts:
        """See `AutoregressiveHead`."""
        return StepParts(
            layer=self.layer,
            vector_norm=self.input_layernorm,
            feature_norm=self.hidden_norm,
            normed_residual=self.norm_before_residual,
        )

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """What the LM head reads: the feature, or its norm."""
        return self.norm(x)


class Eagle3Heads(AutoregressiveHeads):
    """K steps of one layer, or of a layer each.

    Source: Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
    Test", section 3.
    """

    Options = Eagle3Options

    @classmethod
    def taps_of(cls, options: Any) -> tuple[int, ...]:
        """See `DraftHeads`."""
        return options.layers

    def make_head(self, k: int) -> Any:
        """All steps are alike, but that the first one joins the taps."""
        return Eagle3Head(self.config, self.projection, self.options, joins=k == 0)
