"""The module that is trained: heads over stored states, giving their losses. Knows no store and no schedule."""

import torch
from torch import nn

from medusa_spec.finetune.losses import depth_weights, linear_cross_entropy
from medusa_spec.heads import DraftHeads, index_of


class TrainedHeads(nn.Module):
    """Heads with their loss.

    Args:
        heads: In float32, trained in place.
        depth_decay: Head k's loss counts `depth_decay ** k`.
    """

    inverse: torch.Tensor
    weights: torch.Tensor

    def __init__(self, heads: DraftHeads, *, depth_decay: float) -> None:
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
        known = truth >= 0
        if self.heads.sequential:  # whose heads read all tokens before the one they guess
            known &= (targets[:, :-1] >= 0).cummin(dim=1).values
        return torch.where(known, self.inverse[truth.clamp_min(0)], -1)

    def features(self, h: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        """K features [T, H] of the heads, given the true tokens before the ones they guess."""
        return self.heads.features(h, targets[:, :-1].to(torch.int64).clamp_min(0))

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
        losses = torch.stack([self._loss(k, z, indices[:, k]) for k, z in enumerate(self.features(h, targets))])
        return {"loss": (self.weights * losses).sum(), "losses": losses.detach()}

    def _loss(self, k: int, z: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        projection = self.heads.projection
        z, weight, bias = self.heads.head(k).operands(z, projection)
        return linear_cross_entropy(z, weight, bias, index, scale=projection.scale, softcap=projection.softcap)
