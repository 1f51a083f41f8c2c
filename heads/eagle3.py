"""EAGLE-3 heads: one decoder layer over fused layers of the target. Knows tensors, not the model."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from medusa_spec.heads.autoregressive import AutoregressiveHead, AutoregressiveHeads
from medusa_spec.heads.config import HeadsConfig
from medusa_spec.heads.draft_layer import DraftLayer
from medusa_spec.heads.norm import unit_scale
from medusa_spec.heads.projection import Projection
from medusa_spec.heads.sizes import LayerSizes
from medusa_spec.heads.view import View


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(LayerSizes):
    """What EAGLE-3 heads can be told.

    Attributes:
        taps: Layers of the target whose inputs are read, from 0, as `"2,15,27"`: a low, a middle and a high one; or the
            number of a single one.
        tied: One layer for all depths, as published; otherwise one for each.
        norm_taps: Bring every tapped layer to a root mean square of one first: they differ tenfold. Published heads
            were trained without.
    """

    taps: str | int = ""
    tied: bool = True
    norm_taps: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "taps", str(self.taps))
        try:
            layers = self.layers
        except ValueError as error:
            raise ValueError(f"taps must be numbers of layers with commas between, got {self.taps!r}") from error
        if list(layers) != sorted({layer for layer in layers if layer >= 0}):
            raise ValueError(f"taps must be numbers of layers from 0 that rise, got {self.taps!r}")

    @property
    def layers(self) -> tuple[int, ...]:
        """The tapped layers as numbers."""
        return tuple(int(part) for part in str(self.taps).split(",")) if self.taps else ()


def usual_taps(layers: int) -> str:
    """The taps of published heads: the inputs of layers 2, L / 2 and L - 3, as far as there are so many."""
    wanted = sorted({min(2, layers - 1), layers // 2, max(layers - 3, 0)})
    return ",".join(map(str, wanted))


class Eagle3Head(AutoregressiveHead):
    """One step: attention reads the norms of token and feature side by side; the feature is the residual stream.

    ```
    feature of the text = W [low, middle, high]        x = feature + o(attention([norm(e(token)), norm(feature)]))
    next feature = x + mlp(norm(x))                    the LM head reads norm(next feature)
    ```

    W starts as the mean of the tapped layers and the layer as the identity: a fresh head guesses what the target's LM
    head reads in that mean.

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
        self.taps, self.norm_taps = len(options.layers), options.norm_taps
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.layer = DraftLayer(hidden, sizes, inputs=2 * hidden)
        self.norm = nn.RMSNorm(hidden, eps=eps)
        if joins:
            self.fc = nn.Linear(taps * hidden, hidden, bias=False)
            with torch.no_grad():
                self.fc.weight.copy_(torch.eye(hidden).repeat(1, taps) / taps)

    def begin(self, h: torch.Tensor, layers: torch.Tensor | None) -> torch.Tensor:
        """The fused layers [..., L, H]; without taps h stands for them."""
        if not self.taps:
            return self.fc(h)
        if layers is None:
            raise ValueError("layers must be given to EAGLE-3 heads that tap some, got none")
        return self.fc((unit_scale(layers) if self.norm_taps else layers).flatten(-2))

    def step(self, feature: torch.Tensor, vector: torch.Tensor, view: View) -> torch.Tensor:
        """See `AutoregressiveHead`."""
        entered = torch.cat([self.input_layernorm(vector), self.hidden_norm(feature)], dim=-1)
        return self.layer(feature, entered, view)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """What the LM head reads: the feature's norm."""
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
