"""Hydra heads: each also sees the tokens drafted before its own. Knows tensors, not the model they come from."""

from typing import Any, cast

import torch
from torch import nn

from medusa_spec.heads.base import DraftHeads
from medusa_spec.heads.block import ResidualBlock
from medusa_spec.heads.config import HeadsConfig
from medusa_spec.heads.head import Head
from medusa_spec.heads.levels import LevelHeads
from medusa_spec.heads.projection import Projection
from medusa_spec.heads.stacked import Linear


class HydraHead(Head):
    """Head k: h and the embeddings of the k + 1 tokens after it, through one wide block and residual ones.

    ```
    x = [h, e(t + 1), …, e(t + 1 + k)]      z = R x + SiLU(W x + b)      further blocks as Medusa's
    ```

    R x is h (`residual="identity"`), or a trained linear of x (`"linear"`, as published Hydra heads have it). R starts
    as the map to h, W and b at zero, so that a fresh head is the target's own LM head.

    Args:
        config: Sizes and the kind of LM head.
        projection: The target's LM head.
        k: Place of the head, from 0.
    """

    def __init__(self, config: HeadsConfig, projection: Projection, k: int) -> None:
        super().__init__(config, projection)
        self.hidden_size = config.hidden_size
        self.first = nn.Linear((k + 2) * config.hidden_size, config.hidden_size)
        nn.init.zeros_(self.first.weight)
        nn.init.zeros_(self.first.bias)
        if config.residual == "linear":
            self.residual = nn.Linear((k + 2) * config.hidden_size, config.hidden_size)
            nn.init.eye_(self.residual.weight)  # the first H inputs are h
            nn.init.zeros_(self.residual.bias)
        self.blocks = nn.ModuleList(ResidualBlock(config.hidden_size) for _ in range(config.num_layers - 1))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """[..., (k + 2) * H] to [..., H]."""
        kept = self.residual(x) if hasattr(self, "residual") else x[..., : self.hidden_size]
        z = kept + nn.functional.silu(self.first(x))
        for block in self.blocks:
            z = block(z)
        return z


class HydraHeads(DraftHeads):
    """K sequentially dependent heads.

    Source: Ankner et al. 2024, "Hydra", section 3.
    """

    sequential = True

    def make_head(self, k: int) -> HydraHead:
        """Head k reads k + 1 tokens."""
        return HydraHead(self.config, self.projection, k)

    def features(self, h: torch.Tensor, tokens: torch.Tensor | None = None) -> list[torch.Tensor]:
        """K features [..., H], given h [..., H] and the true tokens [..., K]."""
        vectors = self.vectors(tokens).flatten(-2)
        width, features = self.config.hidden_size, []
        for k, head in enumerate(self.heads):
            x = torch.cat([h, vectors[..., : (k + 1) * width]], dim=-1)
            features.append(cast(HydraHead, head).features(x))
        return features


class HydraLevels(LevelHeads):
    """Hydra heads: a node's state is h and the embeddings of the tokens on its path, [M, (depth + 2) * H]."""

    def __init__(self, heads: DraftHeads, **kwargs: Any) -> None:
        super().__init__(heads, **kwargs)
        modules: list[Any] = list(heads.heads)
        self._first = [self._first_of(head) for head in modules]
        self._blocks = [self.frozen_blocks(head.blocks) for head in modules]

    def _first_of(self, head: Any) -> Linear:
        """W x + b, [M, H]; with a linear residual R x before it, [M, 2 H], in one product."""
        if self.config.residual == "identity":
            return self.frozen(head.first)
        parts = (head.residual, head.first)
        return self.dense(torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts]))

    def start(self, h: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        """h and the root's embedding, [M, 2 H]."""
        return torch.cat([h, self.embedding(root)], dim=1)

    def descend(self, depth: int, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The parents' states and the tokens' embeddings, side by side."""
        return torch.cat([state, self.embedding(tokens)], dim=1)

    def features(self, depth: int, state: torch.Tensor) -> torch.Tensor:
        """Each head's wide block, then its residual ones."""
        hidden, first = self.config.hidden_size, self._first[depth](state)
        kept = (state if self.config.residual == "identity" else first)[:, :hidden]
        return self._blocks[depth](kept + nn.functional.silu(first[:, -hidden:]))
