"""A gated MLP with one product for gate and up, wherever a module turns out to be one. Knows no models."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from medusa_spec.prepared.joined import JoinedLinear
from medusa_spec.prepared.kernels import ACTIVATIONS, Function, kernels, takes
from medusa_spec.prepared.swap import RECORD, SCALES, Swapped, sample, swap, swappable, unhooked

NAMES = ("gate_proj", "up_proj")
"""Attributes of the two layers that read the same input."""


@dataclass(frozen=True, kw_only=True)
class GatedRecord:
    """What the fast forward needs.

    Attributes:
        kernel: The kernel between the products.
        joined: Gate and up as one product.
        width: Their outputs.
        activation: Index into `ACTIVATIONS`.
        function: The module's own activation.
    """

    kernel: Function
    joined: JoinedLinear
    width: int
    activation: int
    function: Any


class FastGatedMlp(Swapped):
    """Mixed into a module that computes down(activation(gate(x)) * up(x))."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[..., H] to the same shape."""
        record: GatedRecord = self.__dict__[RECORD]
        x = args[0] if len(args) == 1 and not kwargs else None
        if x is None or not takes(x, record.joined.packed.dtype) or not serves(self, record):
            return super().forward(*args, **kwargs)
        return self._modules["down_proj"](_middle(record, x))  # type: ignore[misc]


def serves(module: nn.Module, record: GatedRecord) -> bool:
    """Whether the module is still what was found, and nothing happens in it that the kernel would leave out."""
    function = module._modules.get("act_fn")
    if function is None:
        function = module.__dict__.get("act_fn")
    elif not unhooked(function):
        return False
    return function is record.function and not module.training and record.joined.serves(module)


def _middle(record: GatedRecord, x: torch.Tensor) -> torch.Tensor:
    gate_up = record.joined(x)
    y = gate_up.new_empty(*x.shape[:-1], record.width)
    rows = y.numel() // record.width
    record.kernel(gate_up.data_ptr(), y.data_ptr(), rows, record.width, record.activation, torch.get_num_threads())
    return y


def activation_of(function: Any) -> int | None:
    """Which activation of the kernels a function is, found by comparing results; None if none."""
    found = kernels(torch.float32)
    if found is None or not callable(function):
        return None
    x = torch.linspace(-30.0, 30.0, 4001, dtype=torch.float32, device="cpu")
    expected = function(x)
    for index in range(len(ACTIVATIONS)):
        y = torch.empty_like(x)
        gate_up = torch.cat([x, torch.ones_like(x)])
        found.gated(gate_up.data_ptr(), y.data_ptr(), 1, len(x), index, 1)
        if torch.allclose(y, expected, rtol=2e-6, atol=2e-6):
            return index
    return None


@torch.inference_mode()
def fasten_gated_mlp(module: nn.Module, joined: JoinedLinear) -> bool:
    """Gives a module the fast forward if it is a gated MLP over `joined`; says whether it was."""
    function = getattr(module, "act_fn", None)
    activation = activation_of(function)
    down = getattr(module, "down_proj", None)
    if not swappable(module) or activation is None or not isinstance(down, nn.Linear):
        return False
    found = kernels(joined.packed.dtype)
    width, outputs = joined.outputs[0], joined.outputs
    if found is None or outputs != [width, width] or down.in_features != width:
        return False
    record = GatedRecord(kernel=found.gated, joined=joined, width=width, activation=activation, function=function)
    for scale in SCALES:
        x = sample(3, joined.packed.inputs, dtype=joined.packed.dtype, scale=scale)
        if not _same(down(_middle(record, x)), module(x)):
            return False
    swap(module, FastGatedMlp, record)
    return True


def _same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for roundings that went through one more product: another computation differs by its whole size."""
    if got.shape != expected.shape:
        return False
    return bool((got - expected).double().norm() <= 1e-2 * expected.double().norm())
