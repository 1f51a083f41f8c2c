"""The residual block of a Medusa head."""

import torch
from torch import nn


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), the identity at the start.

    Both W and b start at zero: SiLU(0) = 0, so a fresh block changes nothing (with the weight alone at zero a random
    bias would already shift its input).

    Source: Cai et al. 2024, "Medusa", section 3.1.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] to [..., H]."""
        return x + nn.functional.silu(self.linear(x))
