"""Linear layers of one input that are packed side by side, so that one product serves them all. Knows no models."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from medusa_spec.prepared.packed_layer import pack_layer
from medusa_spec.prepared.packed_linear import PackedLinear, packed_size


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


def pack_together(layers: Sequence[Any], into: torch.Tensor | None = None) -> torch.Tensor:
    """Packs frozen layers of one input side by side.

    Args:
        layers: As `pack_layer` takes them; all but the last with a multiple of `block_width()` outputs.
        into: Memory of exactly their size; None takes new one.

    Returns:
        The memory, for `JoinedLinear`.
    """
    sizes = [packed_size(layer.out_features, layer.in_features) for layer in layers]
    memory = torch.empty(sum(sizes), dtype=layers[0].weight.dtype, device="cpu") if into is None else into
    for layer, part in zip(layers, memory.split(sizes), strict=True):
        pack_layer(layer, keep_dense=False, into=part)
    return memory
