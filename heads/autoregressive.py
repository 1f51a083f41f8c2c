"""Heads that draft as a small decoder does: each step reads the feature of the one before. Knows no family's layer."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from medusa_spec.heads.base import DraftHeads
from medusa_spec.heads.config import HeadsConfig
from medusa_spec.heads.draft_layer import DraftLayer
from medusa_spec.heads.head import Head
from medusa_spec.heads.view import UnrolledView, View


@dataclass(frozen=True, kw_only=True, eq=False)
class StepParts:
    """What a step is made of, for whoever computes it another way.

    ```
    entered = [vector_norm(vector), feature_norm(feature)]   x = join(entered), or feature + join(entered), whose norm
    next feature = layer(x, entered)                             then enters; without a join the feature, or its norm
    ```

    Attributes:
        layer: A decoder layer.
        join: The product of both inputs, or None.
        vector_norm: Of the embeddings, or None.
        feature_norm: Of the features, or None.
        normed_residual: Without a join, x is the feature's norm.
        added: The feature is added to the join.
        input_norm: Of x before it enters, with a join, or None.
    """

    layer: DraftLayer
    join: nn.Linear | None = None
    vector_norm: nn.RMSNorm | None = None
    feature_norm: nn.RMSNorm | None = None
    normed_residual: bool = False
    added: bool = False
    input_norm: nn.RMSNorm | None = None


class AutoregressiveHead(Head):
    """One step of a draft: from the feature of the last token and the next token to that token's feature.

    A family says what its step is made of, or computes it by itself.
    """

    def begin(self, h: torch.Tensor, layers: torch.Tensor | None) -> torch.Tensor:
        """The feature of a token that the target has read: from h [..., H] and tapped layers [..., L, H], [..., H]."""
        return h

    def parts(self) -> StepParts:
        """What `step` is made of, unless a family overrides it."""
        raise NotImplementedError

    def step(self, feature: torch.Tensor, vector: torch.Tensor, view: View) -> torch.Tensor:
        """The next feature.

        Args:
            feature: [B, T, H], of the tokens before.
            vector: [B, T, H], the target's embeddings of the tokens after those.
            view: What the rows see of the text and of their own drafts.

        Returns:
            [B, T, H].
        """
        parts = self.parts()
        vector = vector if parts.vector_norm is None else parts.vector_norm(vector)
        normed = feature if parts.feature_norm is None else parts.feature_norm(feature)
        entered = torch.cat([vector, normed], dim=-1)
        if parts.join is None:
            return parts.layer(normed if parts.normed_residual else feature, entered, view)
        x = parts.join(entered)
        if parts.added:
            x = feature + x
        return parts.layer(x, x if parts.input_norm is None else parts.input_norm(x), view)


class AutoregressiveHeads(DraftHeads):
    """K steps of feature-level autoregression with attention over the text.

    Raises:
        ValueError: Also if there is to be more than one layer a step.

    Source: Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", section 3.
    """

    sequential = True
    attends = True

    def __init__(self, config: HeadsConfig, *args: Any, **kwargs: Any) -> None:
        if config.num_layers != 1:
            raise ValueError(f"num_layers must be 1 for {config.kind} heads, one layer a step, got {config.num_layers}")
        super().__init__(config, *args, **kwargs)

    @abstractmethod
    def make_head(self, k: int) -> AutoregressiveHead:
        """Step k, as it begins."""

    def head(self, k: int) -> Any:
        """The module of step k; where heads are tied it is that of all."""
        return super().head(k)

    def features(
        self,
        h: torch.Tensor,
        tokens: torch.Tensor | None = None,
        layers: torch.Tensor | None = None,
        steps: int | None = None,
    ) -> list[torch.Tensor]:
        """Features of all drafts that could begin in texts, given the true tokens.

        Args:
            h: [B, T, H]: texts from their first token on.
            tokens: Int64 [B, T, K], the tokens t + 1 … t + K.
            layers: [B, T, L, H], the tapped layers, where the family taps any.
            steps: Steps taken; None is K.

        Returns:
            K tensors [B, T, H].
        """
        vectors = self.vectors(tokens)
        view = UnrolledView(h.shape[0], h.shape[1], h.device, own=self.num_sets > 1)
        feature, features = self.head(0).begin(h, layers), []
        for k in range(steps or self.config.num_heads):
            feature = self.head(k).step(feature, vectors[..., k, :], view.next())
            features.append(self.head(k).features(feature))
        return features
