"""The module that is trained: heads over stored states, giving their losses. Knows no store and no schedule."""

from typing import Any

import torch
from torch import nn

from medusa_spec.finetune.distillation import linear_distillation
from medusa_spec.finetune.losses import depth_weights, linear_cross_entropy
from medusa_spec.heads import DraftHeads, index_of

WEIGHED = ("kl", "log_acceptance")
"""Losses whose mean weighs positions; see `linear_distillation`."""


class TrainedHeads(nn.Module):
    """Heads with their loss.

    Args:
        heads: In float32, trained in place.
        depth_decay: Head k's loss counts `depth_decay ** k`.
        feature_weight: Weight of the distance between what a head's LM head reads and what the target's read at the
            place of the guess, beside the cross-entropy; for families whose features are to be the target's.
        unroll: Steps that are trained, for families that attend; None is all.
        loss: As in `FinetuneConfig`.
    """

    inverse: torch.Tensor
    weights: torch.Tensor

    def __init__(
        self,
        heads: DraftHeads,
        *,
        depth_decay: float,
        feature_weight: float = 0.0,
        unroll: int | None = None,
        loss: str = "cross_entropy",
    ) -> None:
        super().__init__()
        self.loss = loss
        self.heads, self.feature_weight, self.unroll = heads, feature_weight, unroll
        vocab = heads.config.vocab_size
        inverse = torch.arange(vocab) if heads.draft_ids is None else index_of(heads.draft_ids.cpu(), vocab)
        self.register_buffer("inverse", inverse, persistent=False)
        weights = depth_weights(heads.config.num_heads, depth_decay)
        self.register_buffer("weights", weights, persistent=False)

    def indices(self, targets: torch.Tensor) -> torch.Tensor:
        """Rows of the draft vocabulary of the heads' targets.

        Args:
            targets: Int [..., K + 1] of the store.

        Returns:
            Int64 [..., K]; -1 where a head has no target or cannot guess it.
        """
        truth = targets[..., 1:].to(torch.int64)
        return torch.where(self.known(targets), self.inverse[truth.clamp_min(0)], -1)

    def known(self, targets: torch.Tensor) -> torch.Tensor:
        """Bool [..., K], where a head has a target, and all that it reads before; targets [..., K + 1]."""
        known = targets[..., 1:] >= 0
        if self.heads.sequential:  # whose heads read all tokens before the one they guess
            known &= (targets[..., :-1] >= 0).cummin(dim=-1).values
        return known

    def features(
        self,
        h: torch.Tensor,
        targets: torch.Tensor,
        tokens: torch.Tensor | None = None,
        layers: torch.Tensor | None = None,
        steps: int | None = None,
    ) -> list[torch.Tensor]:
        """K features [..., H], or of the first `steps` heads, given the true tokens before the guesses; arguments else
        as `forward`'s."""
        if tokens is None:
            tokens = targets[..., :-1].to(torch.int64).clamp_min(0)
        h = h.to(self.weights.dtype)
        given: dict[str, Any] = {} if steps is None else {"steps": steps}
        if layers is not None and self.heads.taps:
            given["layers"] = layers.to(h.dtype)
        return self.heads.features(h, tokens, **given)

    def positions(self, targets: torch.Tensor) -> torch.Tensor:
        """Bool [..., K], where each head's loss counts; targets [..., K + 1]."""
        return self.indices(targets) >= 0 if self.loss == "cross_entropy" else self.known(targets)

    def counts(
        self, targets: torch.Tensor, teacher_ids: torch.Tensor | None = None, teacher_probs: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What each head's means are divided by: [2, K], for its loss and for the distance.

        Args:
            targets: Int [T, K + 1] of the store, on any device; the counts are on the CPU.
            teacher_ids: As for `forward`.
            teacher_probs: As for `forward`.

        Returns:
            Int64; for losses that weigh positions by the mass that heads can guess, float64.
        """
        targets = targets.to(self.inverse.device)
        counts = self.positions(targets).sum(0)
        if self.loss in WEIGHED:
            assert teacher_ids is not None and teacher_probs is not None, f"{self.loss} learns from probabilities"
            inside = self.inverse[teacher_ids.to(self.inverse.device, torch.int64)] >= 0
            mass = (teacher_probs.to(self.inverse.device, torch.float64) * inside).sum(-1)
            counts = torch.where(self.known(targets), mass, 0).sum(0)
        known = (targets >= 0).cummin(dim=-1).values
        return torch.stack([counts, known[:, 1:].sum(0).to(counts.dtype)]).cpu()

    def forward(
        self,
        h: torch.Tensor,
        targets: torch.Tensor,
        tokens: torch.Tensor | None = None,
        layers: torch.Tensor | None = None,
        teacher_ids: torch.Tensor | None = None,
        teacher_probs: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Losses at the positions of a batch.

        Args:
            h: [..., H], of any float dtype; for families that attend [B, T, H], whole texts.
            targets: Int [..., K + 1] of the store.
            tokens: Int64 [..., K], the tokens t + 1 … t + K where they are more than the targets: prompts are read,
                but not learnt.
            layers: [..., L, H], tapped layers.
            teacher_ids: Int [..., K, k], the likeliest tokens where each head guesses, for losses that learn from them.
            teacher_probs: [..., K, k], their probabilities.
            counts: [2, 2, K], where these are a piece of a larger batch: `counts` of the piece, and of the whole.

        Returns:
            `loss`, the weighted sum; `losses` [K], each head's own mean; of a piece, what it adds to them.
        """
        features = self.features(h, targets, tokens, layers, self.unroll)
        if self.loss == "cross_entropy":
            indices = self.indices(targets)
            terms = [self._loss(k, z, indices[..., k]) for k, z in enumerate(features)]
        else:
            assert teacher_ids is not None and teacher_probs is not None, f"{self.loss} learns from probabilities"
            known = self.known(targets)
            terms = [
                self.taught(self.loss, k, z, teacher_ids[..., k, :], teacher_probs[..., k, :], known[..., k])
                for k, z in enumerate(features)
            ]
        losses = torch.stack(terms)
        weights = self.weights[: len(losses)]
        if counts is not None:
            piece, whole = counts[..., : len(losses)].to(losses.dtype)
            shares = piece / torch.where(whole > 0, whole, 1)
            losses = losses * shares[0]
        loss = (weights * losses).sum()
        if self.feature_weight:
            distances = torch.stack([self._distance(k, z, h, targets) for k, z in enumerate(features)])
            if counts is not None:
                distances = distances * shares[1]
            loss = loss + self.feature_weight * (weights * distances).sum()
        return {"loss": loss, "losses": losses.detach()}

    def _loss(self, k: int, z: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        projection = self.heads.projection
        z, weight, bias = self.heads.head(k).operands(z.flatten(0, -2), projection)
        return linear_cross_entropy(
            z, weight, bias, index.flatten(), scale=projection.scale, softcap=projection.softcap
        )

    def taught(
        self, loss: str, k: int, z: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, known: torch.Tensor
    ) -> torch.Tensor:
        """A loss of head k against the target's probabilities.

        Args:
            loss: One of `distillation.TERMS`.
            k: The head.
            z: Its features [..., H].
            ids: Int [..., k], the likeliest tokens where it guesses.
            probs: [..., k], their probabilities.
            known: Bool [...], where it has a target.
        """
        projection = self.heads.projection
        z, weight, bias = self.heads.head(k).operands(z.flatten(0, -2), projection)
        index = self.inverse[ids.flatten(0, -2).to(torch.int64)]
        return linear_distillation(
            loss,
            z,
            weight,
            bias,
            index,
            probs.flatten(0, -2),
            known.flatten(),
            scale=projection.scale,
            softcap=projection.softcap,
        )

    def _distance(self, k: int, z: torch.Tensor, h: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Smooth L1 between features [B, T, H] and h where they are to stand, k + 1 rows later."""
        counts = (targets[:, : -1 - k, : k + 2] >= 0).all(-1)
        if not counts.any():
            return z.sum() * 0.0
        truth = h[:, 1 + k :].to(z.dtype).detach()  # the target is not to come to meet them
        return nn.functional.smooth_l1_loss(z[:, : -1 - k][counts], truth[counts])
