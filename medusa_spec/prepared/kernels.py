"""The C kernels as functions of tensors. Knows their signatures and layouts, no modules and no models."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from medusa_spec.native.build import library

ELEMENTS = {torch.bfloat16: "bf16", torch.float32: "f32"}
"""Element types that the kernels are compiled for."""

NORM_STYLES = ("scaled", "centred", "scaled32")
"""In the order of native/norm.h."""

ACTIVATIONS = ("silu", "gelu_tanh")
"""In the order of native/activation.h."""

Function = Callable[..., Any]


_POINTER, _LONG, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int


class NormCall(ctypes.Structure):
    """A norm of a layer; native/team.h says what its fields are, here and below."""

    _fields_ = (("weight", _POINTER), ("epsilon", _FLOAT), ("style", _INT))


class LinearCall(ctypes.Structure):
    """A packed linear layer."""

    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("inputs", _LONG), ("outputs", _LONG))


class RowCall(ctypes.Structure):
    """One row of a batch."""

    _fields_ = (("mask", _POINTER), *((name, _LONG) for name in ("nodes", "offset", "first", "common", "end")))


class AttentionCall(ctypes.Structure):
    """Attention of one row, or of a batch."""

    _fields_ = (
        *((name, _POINTER) for name in ("qkv", "cosine", "sine", "q_norm", "k_norm", "sinks")),
        *((name, _POINTER) for name in ("rows", "keys", "values", "mask", "out", "wide", "scratch")),
        *((name, _LONG) for name in ("nodes", "q_heads", "kv_heads", "dim", "rotary", "batch", "head_stride")),
        *((name, _LONG) for name in ("first", "common", "end")),
        *((name, _FLOAT) for name in ("scale", "softcap", "epsilon")),
        *((name, _INT) for name in ("norm_style", "threads")),
    )


class LayerCall(ctypes.Structure):
    """A decoder layer of one row or a batch; native/layer.c."""

    _fields_ = (
        ("hidden", _LONG),
        ("entered", _POINTER),
        ("tap", _POINTER),
        *((name, NormCall) for name in ("first_norm", "second_norm")),
        *((name, LinearCall) for name in ("qkv", "o", "gate_up", "down")),
        ("attention", AttentionCall),
        ("activation", _INT),
    )


class DraftCall(ctypes.Structure):
    """A step of a draft, of one row; native/draft.c."""

    _fields_ = (
        *((name, _POINTER) for name in ("vectors", "features")),
        *((name, NormCall) for name in ("vector_norm", "feature_norm")),
        ("join", LinearCall),
        ("layer", LayerCall),
        ("normed_residual", _INT),
        ("added", _INT),
    )


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels for one element type, as C functions; addresses are those of contiguous tensors on the CPU.

    Attributes:
        dtype: Element type.
        linear: (x, packed weights, float32 bias or None, y, scratch, rows, inputs, outputs, threads).
        norm: (x, weight, y, rows, width, epsilon, style, threads).
        gated: (gate_up, y, rows, width, activation, threads).
        argmax: (x, int64 places, rows, width, threads).
        likeliest: (x, int64 places, float32 chances, rows, width, count, temperature).
        attention: (a pointer to an `AttentionCall`).
        attention_scratch: (a pointer to an `AttentionCall`) to the floats of scratch that it needs.
        layers: (an array of `LayerCall`, count, x, out, scratch).
        layers_scratch: (an array of `LayerCall`, count) to the floats of scratch that they need.
        draft: (a pointer to a `DraftCall`, out, scratch).
        draft_scratch: (a pointer to a `DraftCall`) to the floats of scratch that it needs.
    """

    dtype: torch.dtype
    linear: Function
    norm: Function
    gated: Function
    argmax: Function
    likeliest: Function
    attention: Function
    attention_scratch: Function
    layers: Function
    layers_scratch: Function
    draft: Function
    draft_scratch: Function


@cache
def block_width() -> int:
    """Outputs per block of packed weights on this machine, twice the floats of a register; see native/tile.h.

    Ask `kernels` first: without a library there are no blocks.
    """
    return int(library().handle.columns_f32())  # type: ignore[union-attr]


@cache
def kernels(dtype: torch.dtype) -> Kernels | None:
    """The kernels for tensors of a dtype, or None where there are none: another dtype, or no compiler."""
    handle = library().handle
    if handle is None or dtype not in ELEMENTS:
        return None
    signatures: dict[str, list[Any]] = {
        "linear": [_POINTER] * 5 + [_LONG] * 3 + [_INT],
        "norm": [_POINTER] * 3 + [_LONG] * 2 + [_FLOAT] + [_INT] * 2,
        "gated": [_POINTER] * 2 + [_LONG] * 2 + [_INT] * 2,
        "argmax": [_POINTER] * 2 + [_LONG] * 2 + [_INT],
        "likeliest": [_POINTER] * 3 + [_LONG] * 3 + [_FLOAT],
        "attention": [ctypes.POINTER(AttentionCall)],
        "attention_scratch": [ctypes.POINTER(AttentionCall)],
        "layers": [ctypes.POINTER(LayerCall), _LONG] + [_POINTER] * 3,
        "layers_scratch": [ctypes.POINTER(LayerCall), _LONG],
        "draft": [ctypes.POINTER(DraftCall)] + [_POINTER] * 2,
        "draft_scratch": [ctypes.POINTER(DraftCall)],
    }
    found = {}
    for name, arguments in signatures.items():
        function = getattr(handle, f"{name}_{ELEMENTS[dtype]}")
        function.argtypes, function.restype = arguments, _LONG if name.endswith("scratch") else None
        found[name] = function
    return Kernels(dtype=dtype, **found)


def readable(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a kernel can read this tensor: of its dtype, on the CPU, and without a gradient to pass on.

    Subclasses are left out: those of tracers have no memory behind them.
    """
    plain = type(x) is torch.Tensor or type(x) is torch.nn.Parameter
    return plain and x.dtype == dtype and x.is_cpu and not (x.requires_grad and torch.is_grad_enabled())


def takes(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a kernel may do torch's work on this input.

    Autocast to another dtype would cast it first, and a tracer would see none of what a kernel does.
    """
    return (
        readable(x, dtype)
        and not (torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") != dtype)
        and not torch.jit.is_tracing()
        and not torch.compiler.is_compiling()
    )
