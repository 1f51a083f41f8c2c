"""An nn.Linear that runs on packed weights and still behaves as one. Knows one layer, no models."""

from typing import Any

import torch
from torch import nn

from medusa_spec.prepared.kernels import takes
from medusa_spec.prepared.packed_linear import PackedLinear, unpack

WATCHED = 256
"""Elements of a kept dense weight that are compared at every call; see `KeptDenseLinear`."""


class FrozenPackedLinear(nn.Linear):
    """A frozen linear layer whose dense weight is gone while it is packed.

    In its place stands a tensor of the right shape, dtype and device without memory: one nan, expanded. Whoever reads
    it notices, and writing into it (as merging an adapter does) is an error of torch rather than a change that the
    packed weights would miss. `state_dict`, copies and pickles hold the dense weight, bit for bit; what needs it for
    good (another dtype or device, loading, training) restores it first.

    Made from an `nn.Linear` in place by `pack_layer`, and made one again by `restore`.
    """

    packed: PackedLinear

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        if _trains(self, input):
            if self.weight.requires_grad:
                restore(self)
                return self(input)
            return nn.functional.linear(input, self.dense_weight(), self.bias)
        if not takes(input, self.packed.dtype) or self.weight.stride() != (0, 0):
            return nn.functional.linear(input, self.dense_weight(), self.bias)
        return self.packed(input, self.bias)

    def dense_weight(self) -> torch.Tensor:
        """The weight [out, in]: unpacked, or what was assigned since."""
        if self.weight.stride() != (0, 0):
            return self.weight
        return unpack(self.packed.packed, self.out_features)

    def _apply(self, fn: Any, recurse: bool = True) -> "nn.Module":
        restore(self)
        return self._apply(fn, recurse)  # the layer's own, now

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.dense_weight()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        restore(self)
        self._load_from_state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are plain layers with the dense weight."""
        state = {key: value for key, value in self.__dict__.items() if key != "packed"}
        weight = nn.Parameter(self.dense_weight(), requires_grad=self.weight.requires_grad)
        state["_parameters"] = {**self._parameters, "weight": weight}
        return nn.Linear.__new__, (nn.Linear,), state


class KeptDenseLinear(nn.Linear):
    """A frozen linear layer with packed weights beside the dense one, which others read too (an LM head, tied or not).

    The packed weights are used only while the dense ones are those that were packed: the same tensor, not written to.
    Writing through `.data` leaves no trace in torch, so a fixed sample of `WATCHED` elements is compared as well.
    """

    packed: PackedLinear
    state: tuple[int, int, int]
    places: torch.Tensor
    sample: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        if _trains(self, input) or not takes(input, self.packed.dtype) or not self._unchanged():
            return nn.functional.linear(input, self.weight, self.bias)
        return self.packed(input, self.bias)

    def _unchanged(self) -> bool:
        weight = self.weight
        if (id(weight), weight.data_ptr(), weight._version) != self.state or weight.dtype != self.packed.dtype:
            return False
        return torch.equal(weight.detach().view(-1)[self.places], self.sample)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are plain layers: their weight is another one."""
        state = {key: value for key, value in self.__dict__.items() if key not in _OWN}
        return nn.Linear.__new__, (nn.Linear,), state


def _trains(layer: nn.Linear, *inputs: torch.Tensor) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(t is not None and t.requires_grad for t in (*inputs, layer.weight, layer.bias))


_OWN = ("packed", "state", "places", "sample")


def pack_layer(layer: nn.Linear, *, keep_dense: bool, into: torch.Tensor | None = None) -> int:
    """Packs a frozen bfloat16 or float32 layer on the CPU in place.

    Args:
        layer: An `nn.Linear` itself, no subclass.
        keep_dense: Keep the dense weight beside the packed one. That of one input or output is always kept: strides
            of 0, which mark a weight that is gone, cannot mark it.
        into: Where the packed weights go; see `packed_linear.pack`.

    Returns:
        Bytes that this adds to the memory: those of the copy, or none.
    """
    made: Any = layer  # its class changes in place, which type checkers cannot follow
    made.packed = PackedLinear(layer.weight, into)
    if not keep_dense and min(layer.weight.shape) > 1:
        made.__class__ = FrozenPackedLinear  # first: whatever interrupts, the weight can be restored
        made.weight.data = torch.full((1, 1), float("nan"), dtype=layer.weight.dtype, device="cpu").expand(
            layer.weight.shape
        )
        return 0
    weight = layer.weight.detach()
    step = max(1, weight.numel() // WATCHED)
    made.places = torch.arange(0, weight.numel(), step | 1, device="cpu")  # odd, so that the sample visits every column
    made.sample = weight.reshape(-1)[made.places]
    made.state = (id(layer.weight), layer.weight.data_ptr(), layer.weight._version)
    made.__class__ = KeptDenseLinear
    return made.packed.packed.nbytes


def restore(layer: Any) -> None:
    """Makes a packed layer the plain `nn.Linear` that it was, bit for bit; others are left alone."""
    if isinstance(layer, FrozenPackedLinear):
        with torch.inference_mode(False):  # tensors made in that mode could never be trained again
            layer.weight.data = layer.dense_weight().data
    elif not isinstance(layer, KeptDenseLinear):
        return
    layer.__class__ = nn.Linear
    for name in _OWN:
        layer.__dict__.pop(name, None)
