"""Root-mean-square norms of heads. Know nothing of the target's own norms."""

import torch
from torch import nn

EPS = 1e-6


def unit_scale(x: torch.Tensor) -> torch.Tensor:
    """x [..., F] brought to a root mean square of one along F; its mean is left where it is."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


class ScaleShiftNorm(nn.Module):
    """A trained factor and shift per entry after `unit_scale`; one and zero at the start."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., F] to [..., F]."""
        return self.weight * unit_scale(x) + self.bias
