"""Attention layers whose tree passes run in one kernel, wherever a module turns out to be what it knows.

Knows rotary attention over separate q, k and v layers, not the classes of models.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from medusa_spec.attention import TreePass
from medusa_spec.delegation import TREE_ARGUMENT
from medusa_spec.prepared.joined import JoinedLinear
from medusa_spec.prepared.kernels import AttentionCall, Function, RowCall, kernels, takes
from medusa_spec.prepared.norm import NormRecord, norm_record
from medusa_spec.prepared.packed_layer import FrozenPackedLinear
from medusa_spec.prepared.swap import RECORD, SCALES, Swapped, sample, swap, swappable, within_rounding
from medusa_spec.prepared.watch import Watch

NAMES = ("q_proj", "k_proj", "v_proj")
"""Attributes of the three layers that read the same input."""

HEAD_NORMS = ("q_norm", "k_norm")
"""Attributes of norms over each head, where there are some."""

RECORDING = "medusa_spec.recording"
"""Name of the attention function that records what a layer hands over; used only while a layer is looked at."""

TOKENS = 5
"""Tokens of the comparison."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionRecord:
    """What the fast forward needs.

    Attributes:
        kernel: The attention kernel.
        scratch: Gives the floats of scratch that it needs.
        joined: q, k and v as one product.
        template: A call with everything that does not change from pass to pass.
        watch: Over the layer.
        sinks: The layer's sinks, one logit per query head [Hq], or None.
    """

    kernel: Function
    scratch: Function
    joined: JoinedLinear
    template: AttentionCall
    watch: Watch
    sinks: torch.Tensor | None = None


class FastAttention(Swapped):
    """Mixed into an attention layer; passes without a tree, and whatever the kernel does not know, are as before."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the plain layer: its output [1, M, H], and None for the weights."""
        tree_pass = kwargs.get(TREE_ARGUMENT)
        if type(tree_pass) is not TreePass:
            return super().forward(*args, **kwargs)
        record: AttentionRecord = self.__dict__[RECORD]
        hidden = args[0] if args else kwargs.get("hidden_states")
        positions = kwargs.get("position_embeddings")
        if hidden is None or positions is None or not takes_pass(record, hidden, positions, tree_pass):
            return super().forward(*args, **kwargs)
        if not record.watch.holds():
            return super().forward(*args, **kwargs)
        out = _attend(self, record, hidden, positions, tree_pass)
        return self._modules["o_proj"](out), None  # type: ignore[misc]


def takes_pass(
    record: AttentionRecord,
    hidden: torch.Tensor,
    positions: tuple[torch.Tensor, torch.Tensor],
    tree_pass: TreePass,
) -> bool:
    """Whether the kernel reads these states, angles and this cache."""
    dtype = record.joined.packed.dtype
    return (
        takes(hidden, dtype)
        and hidden.shape[-1] == record.joined.packed.inputs
        and positions[0].dtype == positions[1].dtype == dtype
        and positions[0].shape[-1] == record.template.rotary
        and tree_pass.cache.holds(dtype)
    )


def _attend(
    module: Any,
    record: AttentionRecord,
    hidden: torch.Tensor,
    positions: tuple[torch.Tensor, torch.Tensor],
    tree_pass: TreePass,
) -> torch.Tensor:
    """[1, M, H] to the attention's output before its last product, [1, M, Hq * D]; keys and values are stored."""
    qkv = record.joined(hidden)
    width = record.template.q_heads * record.template.dim
    out = torch.empty(*hidden.shape[:2], width, dtype=qkv.dtype, device="cpu")
    call, angles = AttentionCall.from_buffer_copy(record.template), Angles(positions)
    held: list[Any] = []
    point_to_sinks(call, record, held)
    pointer(tree_pass, held)(call, tree_pass, module.layer_idx, angles)
    call.qkv, call.out = qkv.data_ptr(), out.data_ptr()
    scratch = torch.empty(record.scratch(ctypes.byref(call)), dtype=torch.float32, device="cpu")
    call.scratch = scratch.data_ptr()
    record.kernel(ctypes.byref(call))
    return out


class Angles:
    """Cosines and sines of a pass, as the kernel reads them.

    Args:
        positions: Each [1, M, rotary].
    """

    def __init__(self, positions: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.cosine, self.sine = (states.contiguous() for states in positions)
        self.nodes = self.cosine.shape[1]
        self.addresses = self.cosine.data_ptr(), self.sine.data_ptr()
        self.threads = torch.get_num_threads()


PointTo = Callable[[AttentionCall, TreePass, int, Angles], None]
"""Puts angles, cache and masks of a pass, at a layer, into a call; they must outlive it."""


def pointer(tree_pass: TreePass, held: list[Any]) -> PointTo:
    """What points the calls of a pass.

    Args:
        tree_pass: The pass.
        held: Gets what must outlive the calls.
    """
    return point_to_row if len(tree_pass.parts) == 1 else PointToRows(held)


def point_to_row(call: AttentionCall, tree_pass: TreePass, layer: int, angles: Angles) -> None:
    """For a pass that one row alone takes part in: all threads work on it."""
    row = next(iter(tree_pass.parts))
    _point_to_cache(call, tree_pass, layer, angles, row)
    seen = tree_pass.visible(layer, row)
    call.nodes, call.mask = angles.nodes, seen.mask.data_ptr()
    call.first, call.common, call.end = seen.first, seen.common, seen.end


class PointToRows:
    """For a pass over several rows; layers of one kind share the list of rows.

    Args:
        held: Gets what must outlive the call.
    """

    def __init__(self, held: list[Any]) -> None:
        self._held = held
        self._rows: dict[Any, Any] = {}

    def __call__(self, call: AttentionCall, tree_pass: TreePass, layer: int, angles: Angles) -> None:
        """Points a call of one layer to all rows."""
        keys, parts = _point_to_cache(call, tree_pass, layer, angles), tree_pass.parts
        key = tree_pass.cache.kind(layer)
        if key not in self._rows:
            rows = self._rows[key] = (RowCall * len(parts))()
            self._held.append(rows)
            for own, (row, part) in zip(rows, parts.items(), strict=True):
                seen = tree_pass.visible(layer, row)
                own.mask, own.nodes, own.offset = seen.mask.data_ptr(), part.stop - part.start, row * keys.stride(0)
                own.first, own.common, own.end = seen.first, seen.common, seen.end
        call.nodes, call.batch = angles.nodes, len(parts)
        call.rows = ctypes.addressof(self._rows[key])


def _point_to_cache(call: AttentionCall, tree_pass: TreePass, layer: int, angles: Angles, row: int = 0) -> torch.Tensor:
    """Points to the buffers from a row on; the keys [B, Hkv, capacity, D]."""
    keys, values = tree_pass.cache.buffers(layer)
    call.threads = angles.threads
    call.cosine, call.sine = angles.addresses
    call.keys, call.values, call.head_stride = keys[row].data_ptr(), values[row].data_ptr(), keys.stride(1)
    return keys


def point_to_sinks(call: AttentionCall, record: AttentionRecord, held: list[Any]) -> None:
    """Puts the address of the sinks, as they are now and as floats, into a call; `held` gets what must outlive it."""
    if record.sinks is not None:
        held.append(record.sinks.detach().float().contiguous())
        call.sinks = held[-1].data_ptr()


# --- is it what the kernel knows? -------------------------------------------------------------------------------------


@torch.inference_mode()
def fasten_attention(module: nn.Module, joined: JoinedLinear) -> bool:
    """Gives an attention layer the fast forward if it is rotary attention over `joined`; says whether it was.

    The layer is run once with an attention function that records what it is handed: rotated queries and keys, values,
    the factor of the scores, soft-cap and sinks. What the kernel writes must equal that, and the layer's output must be
    its last product of the attention's.
    """
    own: Any = module
    shape = (getattr(own, "head_dim", None), getattr(own, "layer_idx", None))
    last = getattr(own, "o_proj", None)
    if not swappable(module) or not all(isinstance(value, int) for value in shape):
        return False
    if type(last) is not FrozenPackedLinear or not hasattr(getattr(own, "config", None), "_attn_implementation"):
        return False
    record = _record(module, joined)
    if record is None:
        return False
    for scale in SCALES:
        seen = _record_call(module, joined, record.template.rotary, scale)
        if seen is None or not _agrees(record, seen, last):
            return False
        sinks = seen.settings.get("s_aux")
        if sinks is not None and not any(sinks is parameter for parameter in module._parameters.values()):
            return False
        record = replace(record, sinks=sinks)
        if not _states_agree(record, seen):
            return False
    swap(module, FastAttention, record)
    return True


def _record(module: Any, joined: JoinedLinear) -> AttentionRecord | None:
    """A first record from the layer's sizes; scale, soft-cap and sinks are filled in from what it hands over."""
    found, dim = kernels(joined.packed.dtype), module.head_dim
    if found is None or any(outputs % dim for outputs in joined.outputs) or joined.outputs[1] != joined.outputs[2]:
        return None
    q_heads, kv_heads = (outputs // dim for outputs in joined.outputs[:2])
    if kv_heads == 0 or q_heads % kv_heads:
        return None
    template = AttentionCall()
    template.q_heads, template.kv_heads, template.dim = q_heads, kv_heads, dim
    rotary = getattr(module, "rotary_ndims", None)
    template.rotary = rotary if isinstance(rotary, int) else dim
    norms: list[Any] = [module._modules.get(name) for name in HEAD_NORMS]
    if any(norm is not None for norm in norms):
        first, second = (_head_norm(norm, dim) for norm in norms)
        if first is None or second is None or (first.style, first.epsilon) != (second.style, second.epsilon):
            return None
        template.norm_style, template.epsilon = first.style, first.epsilon
        template.q_norm, template.k_norm = (norm.weight.data_ptr() for norm in norms)
    return AttentionRecord(
        kernel=found.attention,
        scratch=found.attention_scratch,
        joined=joined,
        template=template,
        watch=Watch(module),
    )


def _head_norm(module: Any, dim: int) -> NormRecord | None:
    if not isinstance(module, nn.Module):
        return None
    record = module.__dict__.get(RECORD) or norm_record(module)
    return record if isinstance(record, NormRecord) and module.weight.shape == (dim,) else None


@dataclass(kw_only=True, eq=False)
class _Seen:
    """One call of a layer, as its attention function saw it."""

    hidden: torch.Tensor
    positions: tuple[torch.Tensor, torch.Tensor]
    handed: tuple[torch.Tensor, ...]
    settings: dict[str, Any]
    attended: torch.Tensor
    output: torch.Tensor


def _record_call(module: Any, joined: JoinedLinear, rotary: int, scale: float) -> _Seen | None:
    """Runs the plain layer on made-up states and angles; None if it does not take them or call attention once."""
    dtype, handed, settings = joined.packed.dtype, [], []
    width = module.o_proj.in_features
    attended = sample(1, TOKENS, width, dtype=dtype, seed=1)

    def attention(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        handed.append((query.clone(), key.clone(), value.clone()))
        settings.append(kwargs)
        return attended.view(1, TOKENS, query.shape[1], -1), None

    hidden = sample(1, TOKENS, joined.packed.inputs, dtype=dtype, scale=scale)
    angles = sample(1, TOKENS, rotary // 2, dtype=torch.float32, seed=2, scale=3.0).repeat(1, 1, 2)
    positions = angles.cos().to(dtype), angles.sin().to(dtype)
    config = module.config
    original = config._attn_implementation_internal
    AttentionInterface.register(RECORDING, attention)
    config._attn_implementation_internal = RECORDING
    try:
        output = module(hidden_states=hidden, position_embeddings=positions, attention_mask=None)
    except Exception:  # a layer that wants something else is not one that the kernel knows
        return None
    finally:
        config._attn_implementation_internal = original
        AttentionInterface._global_mapping.pop(RECORDING, None)
    if len(handed) != 1 or not isinstance(output, tuple) or len(output) != 2 or output[1] is not None:
        return None
    return _Seen(
        hidden=hidden,
        positions=positions,
        handed=handed[0],
        settings=settings[0],
        attended=attended,
        output=output[0],
    )


def _agrees(record: AttentionRecord, seen: _Seen, last: nn.Module) -> bool:
    """Whether sizes and output are those of rotary attention; completes the template with what the layer hands over."""
    template, dim = record.template, record.template.dim
    query, key, value = seen.handed
    if query.shape != (1, template.q_heads, TOKENS, dim) or key.shape != (1, template.kv_heads, TOKENS, dim):
        return False
    if value.shape != key.shape or not torch.equal(last(seen.attended), seen.output):
        return False
    scaling, softcap = seen.settings.get("scaling"), seen.settings.get("softcap")
    template.scale = dim**-0.5 if scaling is None else scaling
    template.softcap = softcap or 0.0
    return True


def _states_agree(record: AttentionRecord, seen: _Seen) -> bool:
    """Whether the kernel rotates queries and keys to what the layer handed over, and stores keys and values."""
    (query, key, value), call = seen.handed, AttentionCall.from_buffer_copy(record.template)
    held: list[Any] = []
    point_to_sinks(call, record, held)
    qkv = record.joined(seen.hidden)[0]
    keys, values = (torch.empty(key.shape[1:], dtype=key.dtype, device="cpu") for _ in range(2))
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device="cpu").tril()
    cosine, sine = (states[0].contiguous() for states in seen.positions)
    out = torch.empty(TOKENS, call.q_heads * call.dim, dtype=qkv.dtype, device="cpu")
    call.qkv, call.cosine, call.sine = qkv.data_ptr(), cosine.data_ptr(), sine.data_ptr()
    call.keys, call.values, call.mask, call.out = (t.data_ptr() for t in (keys, values, mask, out))
    call.nodes, call.head_stride, call.threads = TOKENS, keys.stride(0), 1
    scratch = torch.empty(record.scratch(ctypes.byref(call)), dtype=torch.float32, device="cpu")
    call.scratch = scratch.data_ptr()
    record.kernel(ctypes.byref(call))
    rotated = qkv[:, : call.q_heads * call.dim].view(TOKENS, call.q_heads, call.dim).transpose(0, 1)
    pairs = ((rotated, query[0]), (keys, key[0]), (values, value[0]))
    return all(within_rounding(got.contiguous(), expected.contiguous()) for got, expected in pairs)
