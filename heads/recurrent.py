"""Recurrent heads: the target's own feature, corrected token by token. Know tensors, not where they come from."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from medusa_spec.heads.base import DraftHeads
from medusa_spec.heads.block import ResidualBlock
from medusa_spec.heads.config import HeadsConfig
from medusa_spec.heads.head import Head
from medusa_spec.heads.levels import LevelHeads
from medusa_spec.heads.norm import unit_scale
from medusa_spec.heads.options import StateOptions
from medusa_spec.heads.projection import Projection


@dataclass(frozen=True, kw_only=True)
class RecurrentOptions(StateOptions):
    """What recurrent heads can be told; one set of weights unless they are."""

    tied: bool = True


class RecurrentHead(Head):
    """Head k: the state from the one before, moved by what the token t + 1 + k says.

    ```
    z' = z + U SiLU(W [z, e])      e: the token's embedding, at a root mean square of one
    ```

    The state begins as h. U starts at zero, so that a fresh head is the target's own LM head. What is guessed from the
    state passes further blocks as Medusa's, if `num_layers` says so; the state does not.

    Args:
        config: Sizes and the kind of LM head.
        projection: The target's LM head.
        options: Width of the product between W and U.
    """

    def __init__(self, config: HeadsConfig, projection: Projection, options: RecurrentOptions) -> None:
        super().__init__(config, projection)
        hidden, inner = config.hidden_size, options.inner_size or config.hidden_size
        self.mix = nn.Linear(2 * hidden, inner, bias=False)
        self.back = nn.Linear(inner, hidden, bias=False)
        nn.init.zeros_(self.back.weight)
        self.blocks = nn.ModuleList(ResidualBlock(hidden) for _ in range(config.num_layers - 1))

    def step(self, state: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        """State and token's vector, both [..., H], to the next state [..., H]."""
        return state + self.back(nn.functional.silu(self.mix(torch.cat([state, vector], dim=-1))))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """State [..., H] to [..., H]."""
        for block in self.blocks:
            x = block(x)
        return x


class RecurrentHeads(DraftHeads):
    """K residual steps from h, by one small network for all depths or one for each."""

    Options = RecurrentOptions
    sequential = True

    def make_head(self, k: int) -> RecurrentHead:
        """All heads are alike."""
        return RecurrentHead(self.config, self.projection, self.options)

    def features(self, h: torch.Tensor, tokens: torch.Tensor | None = None) -> list[torch.Tensor]:
        """K features [..., H], given h [..., H] and the true tokens [..., K]."""
        state, features = h, []
        for k, vector in enumerate(unit_scale(self.vectors(tokens)).unbind(-2)):
            head: Any = self.head(k)
            state = head.step(state, vector)
            features.append(head.features(state))
        return features


class RecurrentLevels(LevelHeads):
    """Recurrent heads: a node's state is theirs, [M, H]."""

    def __init__(self, heads: DraftHeads, **kwargs: Any) -> None:
        super().__init__(heads, **kwargs)
        modules: list[Any] = [heads.head(k) for k in range(heads.config.num_heads)]
        self._mix = [self.frozen(head.mix) for head in modules]
        self._back = [self.frozen(head.back) for head in modules]
        self._blocks = [self.frozen_blocks(head.blocks) for head in modules]

    def start(self, h: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        """The first states: h [M, H], each moved by its root's token."""
        return self.descend(0, h, root)

    def descend(self, depth: int, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The next states: each moved by a token, [M, H]."""
        mixed = self._mix[depth](torch.cat([state, unit_scale(self.embedding(tokens))], dim=1))
        return state + self._back[depth](nn.functional.silu(mixed))

    def features(self, depth: int, state: torch.Tensor) -> torch.Tensor:
        """States through the further blocks, [M, H]."""
        return self._blocks[depth](state)
