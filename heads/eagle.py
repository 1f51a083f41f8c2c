"""EAGLE-1 heads: one decoder layer over features and embeddings of the text. Knows tensors, not the model."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from medusa_spec.heads.autoregressive import AutoregressiveHead, AutoregressiveHeads, StepParts
from medusa_spec.heads.config import HeadsConfig
from medusa_spec.heads.draft_layer import DraftLayer
from medusa_spec.heads.projection import Projection
from medusa_spec.heads.sizes import LayerSizes


@dataclass(frozen=True, kw_only=True)
class EagleOptions(LayerSizes):
    """What EAGLE-1 heads can be told.

    Attributes:
        tied: One layer for all depths, as published; otherwise one for each.
        bias: Whether the joining product has a bias.
    """

    tied: bool = True
    bias: bool = False


class EagleHead(AutoregressiveHead):
    """One step: the next feature is guessed from this one and the token after it.

    ```
    x = W [e(token), feature]        a layer without a first norm        the LM head reads its output
    ```

    W starts as the map to the feature and the layer as the identity, so that a fresh head is the target's own LM head.

    Args:
        config: Sizes.
        projection: The target's LM head.
        options: The layer's sizes.
    """

    def __init__(self, config: HeadsConfig, projection: Projection, options: EagleOptions) -> None:
        super().__init__(config, projection)
        hidden, sizes = config.hidden_size, options.filled(config.hidden_size)
        self.fc = nn.Linear(2 * hidden, hidden, bias=options.bias)
        self.layer = DraftLayer(hidden, sizes)
        with torch.no_grad():
            self.fc.weight.zero_()[:, hidden:].fill_diagonal_(1.0)
            if options.bias:
                self.fc.bias.zero_()

    def parts(self) -> StepParts:
        """See `AutoregressiveHead`."""
        return StepParts(layer=self.layer, join=self.fc)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """The LM head reads the feature itself."""
        return x


class EagleHeads(AutoregressiveHeads):
    """K steps of one layer, or of a layer each.

    Source: Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty"; the checkpoints of
    EAGLE-2 are of the same form.
    """

    Options = EagleOptions
    mimics = True

    def make_head(self, k: int) -> Any:
        """All steps are alike."""
        return EagleHead(self.config, self.projection, self.options)
