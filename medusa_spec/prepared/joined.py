"""Linear layers of one input that are packed side by side, so that one product serves them all. Knows no models."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from medusa_spec.prepared.packed_layer import packed_now
from medusa_spec.prepared.packed_linear import PackedLinear


class JoinedLinear:
    """Several packed layers of one module, as one product.

    They remain layers of their own, for whoever calls them; both read the same memory.

    Args:
        owner: The module that holds them.
        names: Their attributes, in the order in which they were packed.
        memory: The packed weights of all, one behind the other.
    """

    def __init__(self, owner: nn.Module, names: Sequence[str], memory: torch.Tensor) -> None:
        self.names = tuple(names)
        self.layers: list[Any] = [getattr(owner, name) for name in names]
        self.packed = PackedLinear.joined([layer.packed for layer in self.layers], memory)
        self.outputs = [layer.out_features for layer in self.layers]

    def serves(self, owner: nn.Module) -> bool:
        """Whether the owner still holds these very layers, packed, without an adapter in front or hooks on them."""
        modules = owner._modules
        for name, layer in zip(self.names, self.layers, strict=True):
            if modules.get(name) is not layer or not packed_now(layer):
                return False
        return True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., sum of outputs]."""
        return self.packed(x, self.bias())

    def bias(self) -> torch.Tensor | None:
        """The layers' biases side by side, as they are now; None if they have none."""
        biases = [layer._parameters["bias"] for layer in self.layers]
        if all(bias is None for bias in biases):
            return None
        dtype = self.packed.dtype
        return torch.cat(
            [
                torch.zeros(outputs, dtype=dtype, device="cpu") if bias is None else bias.detach()
                for bias, outputs in zip(biases, self.outputs, strict=True)
            ]
        )
