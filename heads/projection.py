"""The target's LM head, frozen, restricted to the draft vocabulary. Knows a matrix, not the model it is from."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class Projection:
    """From features to draft logits by rows of the target's LM head and the target's own post-processing.

    Attributes:
        weight: Rows of the LM head, [V or draft vocabulary, H]; never trained.
        bias: Their biases, or None.
        scale: Factor by which the target multiplies its logits.
        softcap: c of c * tanh(logits / c), by which the target caps its logits; None where it does not.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """[..., H] to logits [..., V or draft vocabulary]."""
        return self.finish(torch.nn.functional.linear(features, self.weight, self.bias))

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's post-processing of raw LM-head outputs, [..., V] to [..., V]."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def rows(self, ids: torch.Tensor | None) -> "Projection":
        """The same projection restricted to the token ids [draft vocabulary]; None keeps all."""
        if ids is None:
            return self
        ids = ids.to(self.weight.device)
        bias = None if self.bias is None else self.bias[ids].contiguous()
        return Projection(weight=self.weight[ids].contiguous(), bias=bias, scale=self.scale, softcap=self.softcap)

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> "Projection":
        """The same projection in another dtype (training in float32 beside a bf16 target), on another device."""
        return self.map(lambda tensor: tensor.to(device=device, dtype=dtype))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Projection":
        """The same projection with each of its tensors changed."""
        return replace(self, weight=change(self.weight), bias=None if self.bias is None else change(self.bias))
