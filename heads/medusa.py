"""Medusa heads: K parallel guesses from one hidden state. Knows tensors, not the model they come from."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from medusa_spec.heads.base import DraftHeads
from medusa_spec.heads.block import ResidualBlock
from medusa_spec.heads.config import HeadsConfig
from medusa_spec.heads.head import Head
from medusa_spec.heads.projection import Projection


class MedusaHead(Head):
    """Residual blocks, then an LM head; the identity at the start."""

    def __init__(self, config: HeadsConfig, projection: Projection) -> None:
        super().__init__(config, projection)
        self.blocks = nn.ModuleList(ResidualBlock(config.hidden_size) for _ in range(config.num_layers))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """h [..., H] to [..., H]."""
        for block in self.blocks:
            x = block(x)
        return x


class MedusaHeads(DraftHeads):
    """K Medusa heads with an identity start: before training each one is the target's own LM head.

    Source: Cai et al. 2024, "Medusa", section 3.1.
    """

    def make_head(self, k: int) -> MedusaHead:
        """All heads are alike."""
        return MedusaHead(self.config, self.projection)

    def features(self, h: torch.Tensor, tokens: torch.Tensor | None = None) -> list[torch.Tensor]:
        """K features [..., H]; the heads' first blocks read the same h, so they pass as one product."""
        blocks = [[cast(ResidualBlock, b) for b in cast(MedusaHead, head).blocks] for head in self.heads]
        parts = _side_by_side([own[0].linear for own in blocks], h)
        features = []
        for own, part in zip(blocks, parts, strict=True):
            z = h + nn.functional.silu(part)
            for block in own[1:]:
                z = block(z)
            features.append(z)
        return features


def _side_by_side(linears: list[nn.Linear], x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Each linear's x [..., H], in one product; layers around which adapters stand are called one by one."""
    if any(type(linear) is not nn.Linear for linear in linears):
        return [linear(x) for linear in linears]
    weight = torch.cat([linear.weight for linear in linears])
    bias = torch.cat([linear.bias for linear in linears])
    return nn.functional.linear(x, weight, bias).chunk(len(linears), dim=-1)
