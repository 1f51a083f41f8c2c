"""The module that is trained: heads over stored states, giving their losses. Knows no store and no schedule."""

from typing import cast

import torch
from torch import nn

from medusa_spec.finetune.losses import depth_weights, linear_cross_entropy
from medusa_spec.heads import MedusaHeads, index_of
from medusa_spec.heads.block import ResidualBlock
from medusa_spec.heads.medusa import MedusaHead


class TrainedHeads(nn.Module):
    """Heads with their loss.

    Args:
        heads: In float32, trained in place.
        depth_decay: Head k's loss counts `depth_decay ** k`.
    """

    inverse: torch.Tensor
    weights: torch.Tensor

    def __init__(self, heads: MedusaHeads, *, depth_decay: float) -> None:
        super().__init__()
        self.heads = heads
        vocab = heads.config.vocab_size
        inverse = torch.arange(vocab) if heads.draft_ids is None else index_of(heads.draft_ids.cpu(), vocab)
        self.register_buffer("inverse", inverse, persistent=False)
        weights = depth_weights(heads.config.num_heads, depth_decay)
        self.register_buffer("weights", weights, persistent=False)

    def indices(self, targets: torch.Tensor) -> torch.Tensor:
        """Rows of the draft vocabulary of the heads' targets.

        Args:
            targets: Int [T, K + 1] of the store.

        Returns:
            Int64 [T, K]; -1 where a head has no target or cannot guess it.
        """
        truth = targets[:, 1:].to(torch.int64)
        return torch.where(truth >= 0, self.inverse[truth.clamp_min(0)], -1)

    def features(self, h: torch.Tensor) -> list[torch.Tensor]:
        """K features [T, H]; the heads' first blocks read the same h, so they pass as one product."""
        blocks = [[cast(ResidualBlock, b) for b in cast(MedusaHead, head).blocks] for head in self.heads.heads]
        first = [own[0].linear for own in blocks]
        weight = torch.cat([linear.weight for linear in first])
        bias = torch.cat([linear.bias for linear in first])
        parts = nn.functional.linear(h, weight, bias).chunk(len(first), dim=1)
        features = []
        for own, part in zip(blocks, parts, strict=True):
            z = h + nn.functional.silu(part)
            for block in own[1:]:
                z = block(z)
            features.append(z)
        return features

    def forward(self, h: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Losses at the positions of a batch.

        Args:
            h: [T, H], of any float dtype.
            targets: Int [T, K + 1] of the store.

        Returns:
            `loss`, the weighted sum; `losses` [K], each head's own mean.
        """
        h = h.to(self.weights.dtype)
        indices = self.indices(targets)
        losses = torch.stack([self._loss(k, z, indices[:, k]) for k, z in enumerate(self.features(h))])
        return {"loss": (self.weights * losses).sum(), "losses": losses.detach()}

    def _loss(self, k: int, z: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        projection = self.heads.projection
        z, weight, bias = lm_head_operands(self.heads.heads[k], z, projection.weight, projection.bias)
        return linear_cross_entropy(z, weight, bias, index, scale=projection.scale, softcap=projection.softcap)


def lm_head_operands(
    head: nn.Module, z: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What a head's LM head multiplies, as one product whatever its kind.

    ```
    shared    z, W            own    z, W_head            low rank    [z, z D^T], [W, U]
    ```
    """
    assert isinstance(head, MedusaHead)
    if hasattr(head, "lm_head"):
        return z, head.lm_head.weight, head.lm_head.bias
    if hasattr(head, "up"):
        return torch.cat([z, head.down(z)], dim=1), torch.cat([weight, head.up.weight], dim=1), bias
    return z, weight, bias
