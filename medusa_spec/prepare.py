"""The frozen target made fast for decoding, and given back. Knows kinds of modules by what they compute, no classes."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import nn

from medusa_spec.native.build import library
from medusa_spec.prepared import attention, gated_mlp
from medusa_spec.prepared.decoder import FastDecoder, fasten_decoder
from medusa_spec.prepared.decoder_layer import fasten_decoder_layer
from medusa_spec.prepared.joined import JoinedLinear, pack_together
from medusa_spec.prepared.kernels import ELEMENTS, block_width
from medusa_spec.prepared.memory import large_pages, leave_mapped_files
from medusa_spec.prepared.norm import fasten_norm
from medusa_spec.prepared.packed_layer import pack_layer, restore
from medusa_spec.prepared.packed_linear import PackedLinear, available, packed_size
from medusa_spec.prepared.swap import swap_back

WORTH_IT = 0.9
"""Speed over torch's linear, summed over the pass sizes tried, below which nothing is done.

A little may be lost on products: layers in one call win more than that back.
"""

ROUNDS = 25
"""How often each way of computing a layer is timed."""

JOINED: dict[tuple[str, ...], Callable[[nn.Module, JoinedLinear], bool]] = {
    attention.NAMES: attention.fasten_attention,
    gated_mlp.NAMES: gated_mlp.fasten_gated_mlp,
}
"""Layers that are packed side by side where a module has all of them, and what may then replace its forward."""


@dataclass(kw_only=True, eq=False)
class Prepared:
    """What was done to a model.

    Attributes:
        reason: In words, what was done or why nothing was.
        layers: The packed layers.
        modules: Modules with a faster forward: norms, MLPs, attention, decoder layers.
        extra_bytes: Memory that packing added: copies of weights that others read too.
    """

    reason: str
    layers: list[nn.Linear] = field(default_factory=list, repr=False)
    modules: list[nn.Module] = field(default_factory=list, repr=False)
    extra_bytes: int = 0

    def undo(self) -> None:
        """Gives every module its forward and every layer its dense weight back, bit for bit; twice does nothing."""
        for module in self.modules:
            swap_back(module)
        for layer in self.layers:
            restore(layer)
        self.modules.clear()
        self.layers.clear()
        self.extra_bytes = 0


def prepare(model: nn.Module, lm_head: nn.Module | None = None) -> Prepared:
    """Makes a frozen bfloat16 or float32 model on CPU fast for passes of a few tokens, if that pays on this machine.

    Linear layers are packed (see `prepared/packed_layer.py`), q-k-v and gate-up as one product each, and norms, gated
    MLPs and the attention of tree passes run in one kernel each wherever a module is found to compute just that, by
    comparing results. What is not found stays as it is. Where the kernels are not there or not faster nothing is done;
    `Prepared.reason` says what was done, or why nothing was.

    Args:
        model: The target.
        lm_head: Its LM head, which keeps its dense weight: heads and embeddings read it.

    Returns:
        A record with `undo()`.
    """
    for module in model.modules():  # what a wrapper left packed that nobody holds any more
        swap_back(module)
        restore(module)
    layers = [module for module in model.modules() if _packable(module)]
    if not layers:
        return Prepared(reason="not prepared: no bfloat16 or float32 linear layers on the CPU")
    if not available():
        return Prepared(reason=f"not prepared: {library().reason}")
    with _one_thread():
        gain = _gain(sorted(layers, key=lambda layer: layer.weight.numel())[len(layers) // 2])
        if gain < WORTH_IT:
            return Prepared(reason=f"not prepared: packing would bring only {gain:.2f} x on this machine")
        prepared = Prepared(reason="", layers=layers)
        try:
            _prepare(model, lm_head, prepared)
        except BaseException:  # out of memory, or interrupted
            prepared.undo()
            raise
    prepared.reason = (
        f"{len(layers)} linear layers packed, {gain:.1f} x torch's linear at 1 to 16 rows; "
        f"{len(prepared.modules)} norms, MLPs, attention and decoder layers in one kernel each, "
        f"{_passes(prepared.modules)}; {prepared.extra_bytes / 2**20:.0f} MiB more memory"
    )
    return prepared


def _passes(modules: list[nn.Module]) -> str:
    if any(isinstance(module, FastDecoder) for module in modules):
        return "tree passes in one call and bit-equal to one-token passes"
    return "tree passes module by module"


@contextmanager
def _one_thread() -> Iterator[None]:
    """On a busy machine threads wait for each other at every one of many small steps: seconds instead of tenths."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _prepare(model: nn.Module, lm_head: nn.Module | None, prepared: Prepared) -> None:
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    shared = {id(m) for m in prepared.layers if m is lm_head or owners[id(m.weight)] > 1}
    joined, together = [], set[int]()
    for module in model.modules():
        for names in JOINED:
            group = [module._modules.get(name) for name in names]
            if _joinable(group, prepared.layers, shared | together):
                joined.append((module, names, group))
                together |= {id(layer) for layer in group}
    apart = [layer for layer in prepared.layers if id(layer) not in together]
    gone = {id(layer.weight) for layer in prepared.layers} - {id(m.weight) for m in prepared.layers if id(m) in shared}
    leave_mapped_files(parameter for parameter in model.parameters() if id(parameter) not in gone)
    memory = _Memory(prepared.layers)
    packed = [pack_together(group, memory.take(group)) for _, _, group in joined]
    for layer in apart:
        prepared.extra_bytes += pack_layer(layer, keep_dense=id(layer) in shared, into=memory.take([layer]))
    _fasten(model, fasten_norm, prepared)
    for (module, names, _), weights in zip(joined, packed, strict=True):
        if JOINED[names](module, JoinedLinear(module, names, weights)):
            prepared.modules.append(module)
    _fasten(model, fasten_decoder_layer, prepared)
    _fasten(model, fasten_decoder, prepared)


def _fasten(model: nn.Module, fasten: Callable[[nn.Module], bool], prepared: Prepared) -> None:
    for module in model.modules():
        if fasten(module):
            prepared.modules.append(module)  # at once: whatever interrupts, it can be given back


def _packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Plain frozen linears on the CPU; subclasses and hooked forwards have a will of their own."""
    return (
        type(module) is nn.Linear
        and "forward" not in module.__dict__
        and module.weight.dtype in ELEMENTS
        and module.weight.device.type == "cpu"
        and not module.weight.requires_grad
    )


def _joinable(group: list[Any], layers: list[nn.Linear], taken: set[int]) -> bool:
    """Layers of one input and dtype, whose blocks of packed weights meet without a gap; none is taken already."""
    known = {id(layer) for layer in layers} - taken
    if len({id(layer) for layer in group} & known) < len(group):
        return False
    alike = {(layer.in_features, layer.weight.dtype) for layer in group}
    whole = all(layer.out_features % block_width() == 0 for layer in group[:-1])
    return len(alike) == 1 and whole and min(min(layer.weight.shape) for layer in group) > 1


class _Memory:
    """One piece of memory per dtype for all packed weights of a model, filled from its beginning.

    Args:
        layers: All that will be packed.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        sizes: Counter[torch.dtype] = Counter()
        for layer in layers:
            sizes[layer.weight.dtype] += packed_size(layer.out_features, layer.in_features)
        self.free = {dtype: large_pages(size, dtype) for dtype, size in sizes.items()}

    def take(self, layers: list[Any]) -> torch.Tensor:
        """Room for layers packed side by side."""
        dtype = layers[0].weight.dtype
        size = sum(packed_size(layer.out_features, layer.in_features) for layer in layers)
        taken, self.free[dtype] = self.free[dtype].split([size, len(self.free[dtype]) - size])
        return taken


@torch.inference_mode()
def _gain(layer: nn.Linear) -> float:
    """How many times as fast as torch's linear the kernel is on one layer, at 1, 4 and 16 rows together.

    The best of many rounds, in turn: what was disturbed says nothing about either.
    """
    packed, best = PackedLinear(layer.weight), dict[tuple[str, int], float]()
    for rows in (1, 4, 16) * ROUNDS:
        x = torch.ones(rows, layer.in_features, dtype=layer.weight.dtype, device="cpu")
        for name, linear in (
            ("torch", lambda x: nn.functional.linear(x, layer.weight, layer.bias)),
            ("packed", lambda x: packed(x, layer.bias)),
        ):
            best[name, rows] = min(_timed(linear, x), best.get((name, rows), float("inf")))
    sums = {name: sum(value for (key, _), value in best.items() if key == name) for name in ("torch", "packed")}
    return sums["torch"] / sums["packed"]


def _timed(linear: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    began = time.perf_counter()
    linear(x)
    return time.perf_counter() - began
