"""Medusa heads: K parallel guesses from one hidden state. Knows tensors, not the model they come from."""

from typing import Any

import torch
from torch import nn

from medusa_spec.heads.block import ResidualBlock
from medusa_spec.heads.config import HeadsConfig
from medusa_spec.heads.projection import Projection


class MedusaHead(nn.Module):
    """One head: residual blocks, then an LM head.

    With `own`, `lm_head` is a trained copy of the target's rows; with `low_rank`, `down` and `up` are a trained
    addition to them; with `shared` there is neither.
    """

    def __init__(self, config: HeadsConfig, projection: Projection) -> None:
        super().__init__()
        hidden, draft = config.hidden_size, config.num_draft_tokens
        self.blocks = nn.ModuleList(ResidualBlock(hidden) for _ in range(config.num_layers))
        if config.lm_head == "own":
            self.lm_head = nn.Linear(hidden, draft, bias=projection.bias is not None)
            with torch.no_grad():
                self.lm_head.weight.copy_(projection.weight)
                if projection.bias is not None:
                    self.lm_head.bias.copy_(projection.bias)
        elif config.lm_head == "low_rank":
            self.down = nn.Linear(hidden, config.rank, bias=False)
            self.up = nn.Linear(config.rank, draft, bias=False)
            nn.init.zeros_(self.up.weight)

    def features(self, h: torch.Tensor) -> torch.Tensor:
        """[..., H] to [..., H]; the identity at the start."""
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, h: torch.Tensor, projection: Projection) -> torch.Tensor:
        """[..., H] to logits [..., draft vocabulary]."""
        z = self.features(h)
        if hasattr(self, "lm_head"):
            return projection.finish(self.lm_head(z))
        raw = nn.functional.linear(z, projection.weight, projection.bias)
        if hasattr(self, "up"):
            raw = raw + self.up(self.down(z))
        return projection.finish(raw)


class MedusaHeads(nn.Module):
    """K Medusa heads with an identity start: before training each one is the target's own LM head.

    Head k (from 0) sees h at position t, from which the target chose token t + 1, and guesses token t + 2 + k.

    Source: Cai et al. 2024, "Medusa", section 3.1.

    Args:
        config: Sizes and the kind of LM head.
        projection: The target's LM head restricted to `draft_ids`; it is not part of the heads' state.
        draft_ids: Int64 [draft vocabulary], target ids of the tokens that the heads guess, rising; None means all V.

    Raises:
        ValueError: If the projection or the draft vocabulary does not have the sizes that `config` says.
    """

    draft_ids: torch.Tensor | None

    def __init__(self, config: HeadsConfig, projection: Projection, draft_ids: torch.Tensor | None = None) -> None:
        super().__init__()
        expected = (config.num_draft_tokens, config.hidden_size)
        if tuple(projection.weight.shape) != expected:
            raise ValueError(
                f"projection.weight must be {expected} (draft vocabulary, hidden_size), got "
                f"{tuple(projection.weight.shape)}; were these heads made for another model?"
            )
        if (draft_ids is None) != (config.draft_vocab_size is None):
            raise ValueError("draft_ids must be given if, and only if, config.draft_vocab_size is set")
        if draft_ids is not None and draft_ids.numel() != config.draft_vocab_size:
            raise ValueError(
                f"draft_ids must hold draft_vocab_size = {config.draft_vocab_size} ids, got {draft_ids.numel()}"
            )
        self.config = config
        self.projection = projection
        self.heads = nn.ModuleList(MedusaHead(config, projection) for _ in range(config.num_heads))
        self.register_buffer("draft_ids", draft_ids)

    def _apply(self, fn: Any, recurse: bool = True) -> "MedusaHeads":
        """Takes the projection along when the heads are cast or moved: it is no parameter of theirs."""
        super()._apply(fn, recurse)
        self.projection = self.projection.map(fn)
        return self

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Draft logits of every head.

        Args:
            h: Hidden states [..., H], in the heads' dtype.

        Returns:
            Logits [K, ..., draft vocabulary].
        """
        return torch.stack([head(h, self.projection) for head in self.heads])
