"""The target's input embeddings, frozen, as sequential heads read them. Knows a matrix, not the model it is from."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenEmbedding:
    """From token ids to vectors, as the target's first layer sees them.

    Attributes:
        weight: [V, H]; never trained, and no part of the heads' state.
        scale: Factor that the target puts on them.
    """

    weight: torch.Tensor
    scale: float = 1.0

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Int64 [...] to [..., H]."""
        vectors = torch.nn.functional.embedding(ids, self.weight)
        return vectors if self.scale == 1.0 else vectors * self.scale

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "TokenEmbedding":
        """The same embedding with its weight changed."""
        return replace(self, weight=change(self.weight))

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> "TokenEmbedding":
        """The same embedding in another dtype, on another device."""
        return self.map(lambda tensor: tensor.to(device=device, dtype=dtype))
