"""The end of every head: from its features to draft logits, by the target's LM head or one of its own."""

import torch
from torch import nn

from medusa_spec.heads.config import HeadsConfig
from medusa_spec.heads.projection import Projection
from medusa_spec.heads.weight import weight_of

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


class Head(nn.Module):
    """One head: what a family puts before, then an LM head.

    With `own`, `lm_head` is a trained copy of the target's rows, and of its biases as `lm_head_bias` says; with
    `low_rank`, `down` and `up` are a trained addition to them; with `shared` there is neither.

    Args:
        config: Sizes and the kind of LM head.
        projection: The target's LM head.
        width: What an `own` LM head reads; None is H. One of another width begins at random, as no row would fit.
    """

    def __init__(self, config: HeadsConfig, projection: Projection, *, width: int | None = None) -> None:
        super().__init__()
        hidden, draft = config.hidden_size, config.num_draft_tokens
        if config.lm_head == "own":
            bias = projection.bias is not None if config.lm_head_bias is None else config.lm_head_bias
            self.lm_head = nn.Linear(width or hidden, draft, bias=bias)
            with torch.no_grad():
                if width in (None, hidden):
                    self.lm_head.weight.copy_(projection.weight)
                else:
                    nn.init.normal_(self.lm_head.weight, std=self.lm_head.in_features**-0.5)
                if bias:
                    self.lm_head.bias.zero_() if projection.bias is None else self.lm_head.bias.copy_(projection.bias)
        elif config.lm_head == "low_rank":
            self.down = nn.Linear(hidden, config.rank, bias=False)
            self.up = nn.Linear(config.rank, draft, bias=False)
            nn.init.zeros_(self.up.weight)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """What the family computes from its input [..., F]: [..., H]."""
        raise NotImplementedError

    def logits(self, z: torch.Tensor, projection: Projection) -> torch.Tensor:
        """Features [..., H] to logits [..., draft vocabulary]."""
        if hasattr(self, "lm_head"):
            return projection.finish(self.lm_head(z))
        raw = nn.functional.linear(z, projection.weight, projection.bias)
        if hasattr(self, "up"):
            raw = raw + self.up(self.down(z))
        return projection.finish(raw)

    def forward(self, x: torch.Tensor, projection: Projection) -> torch.Tensor:
        """[..., F] to logits [..., draft vocabulary]."""
        return self.logits(self.features(x), projection)

    def operands(self, z: torch.Tensor, projection: Projection) -> Operands:
        """What the LM head multiplies, as one product whatever its kind, for features [T, H].

        ```
        shared    z, W            own    z, W_head            low rank    [z, z D^T], [W, U]
        ```
        """
        weight, bias = projection.weight, projection.bias
        if hasattr(self, "lm_head"):
            return z, weight_of(self.lm_head), self.lm_head.bias
        if hasattr(self, "up"):
            return torch.cat([z, self.down(z)], dim=1), torch.cat([weight, weight_of(self.up)], dim=1), bias
        return z, weight, bias
