"""The frozen target made fast for decoding, and given back. Knows linear layers, not architectures."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch import nn

from medusa_spec.native.build import library
from medusa_spec.packed_layer import pack_layer, restore
from medusa_spec.packed_linear import PackedLinear, available

WORTH_IT = 1.05
"""Packing must win by this factor over torch's linear, summed over the pass sizes tried, or it is left out."""


@dataclass(kw_only=True, eq=False)
class Prepared:
    """What was done to a model.

    Attributes:
        reason: In words, what was done or why nothing was.
        layers: The packed layers.
        extra_bytes: Memory that packing added: copies of weights that others read too.
    """

    reason: str
    layers: list[nn.Linear] = field(default_factory=list, repr=False)
    extra_bytes: int = 0

    def undo(self) -> None:
        """Gives every layer its dense weight back, bit for bit; calling it twice does nothing."""
        for layer in self.layers:
            restore(layer)
        self.layers.clear()
        self.extra_bytes = 0


def prepare(model: nn.Module, lm_head: nn.Module | None = None) -> Prepared:
    """Packs the linear layers of a frozen bfloat16 model on CPU, if that is faster on this machine.

    On processors without bfloat16 instructions a library's pass over 16 rows takes several times that over one; see
    native/bf16_gemm.c. Where the kernel is not there or not faster nothing is done, and `Prepared.reason` says why.

    Args:
        model: The target.
        lm_head: Its LM head, which keeps its dense weight: heads and embeddings read it.

    Returns:
        A record with `undo()`.
    """
    for module in model.modules():
        restore(module)  # what a wrapper left packed that nobody holds any more
    layers = [module for module in model.modules() if _packable(module)]
    if not layers:
        return Prepared(reason="not prepared: no bfloat16 linear layers on the CPU")
    if not available():
        return Prepared(reason=f"not prepared: {library().reason}")
    gain = _gain(sorted(layers, key=lambda layer: layer.weight.numel())[len(layers) // 2])
    if gain < WORTH_IT:
        return Prepared(reason=f"not prepared: packing would bring only {gain:.2f} x on this machine")
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    try:
        extra = sum(pack_layer(m, keep_dense=m is lm_head or owners[id(m.weight)] > 1) for m in layers)
    except BaseException:  # out of memory, or interrupted
        Prepared(reason="", layers=layers).undo()
        raise
    reason = (
        f"{len(layers)} linear layers packed, {gain:.1f} x torch's linear at 1 to 16 rows; "
        f"{extra / 2**20:.0f} MiB more memory"
    )
    return Prepared(reason=reason, layers=layers, extra_bytes=extra)


def _packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Plain frozen bfloat16 linears on the CPU; subclasses and hooked forwards have a will of their own."""
    return (
        type(module) is nn.Linear
        and "forward" not in module.__dict__
        and module.weight.dtype == torch.bfloat16
        and module.weight.device.type == "cpu"
        and not module.weight.requires_grad
    )


def _gain(layer: nn.Linear) -> float:
    """How many times as fast as torch's linear the kernel is on one layer, at 1, 4 and 16 rows together."""
    packed, seconds = PackedLinear(layer.weight), {"torch": 0.0, "packed": 0.0}
    with torch.inference_mode():
        for rows in (1, 4, 16):
            x = torch.ones(rows, layer.in_features, dtype=torch.bfloat16, device="cpu")
            for name, linear in (
                ("torch", lambda x: nn.functional.linear(x, layer.weight, layer.bias)),
                ("packed", lambda x: packed(x, layer.bias)),
            ):
                seconds[name] += min(_timed(linear, x) for _ in range(5))
    return seconds["torch"] / seconds["packed"]


def _timed(linear: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    began = time.perf_counter()
    linear(x)
    return time.perf_counter() - began
