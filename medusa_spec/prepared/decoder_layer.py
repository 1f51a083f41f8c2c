"""Decoder layers whose tree passes run in one call, wherever a module turns out to be one. Knows no models.

The parts are modules that were given fast forwards before; here they are chained without returning to Python.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from medusa_spec.attention import TreePass
from medusa_spec.delegation import TREE_ARGUMENT
from medusa_spec.prepared import attention, gated_mlp
from medusa_spec.prepared.attention import AttentionRecord, FastAttention, row_calls
from medusa_spec.prepared.gated_mlp import FastGatedMlp, GatedRecord
from medusa_spec.prepared.joined import JoinedLinear
from medusa_spec.prepared.kernels import Function, LayerCall, LinearCall, NormCall, kernels, takes
from medusa_spec.prepared.norm import FastNorm, NormRecord, still_fits
from medusa_spec.prepared.packed_layer import FrozenPackedLinear, packed_now
from medusa_spec.prepared.swap import RECORD, Swapped, sample, swap, swappable, unhooked

PARTS: dict[str, type[nn.Module]] = {
    "input_layernorm": FastNorm,
    "self_attn": FastAttention,
    "post_attention_layernorm": FastNorm,
    "mlp": FastGatedMlp,
}
"""Attributes of the four parts, in the order in which they run."""

TOKENS = 3
"""Tokens of the comparison."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerRecord:
    """What the fast forward needs.

    Attributes:
        kernel: The layer kernel.
        scratch: How many floats of scratch a call needs.
        parts: The four parts, by attribute.
        records: Their own records.
        last: The last products of attention and MLP.
        template: A call with all sizes and the addresses of packed weights.
    """

    kernel: Function
    scratch: Function
    parts: dict[str, nn.Module]
    records: dict[str, Any]
    last: tuple[FrozenPackedLinear, FrozenPackedLinear]
    template: LayerCall


class FastDecoderLayer(Swapped):
    """Mixed into a decoder layer; passes without a tree are as before."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """[B, N, H] to the same shape."""
        tree_pass, record = kwargs.get(TREE_ARGUMENT), self.__dict__[RECORD]
        hidden = args[0] if args else kwargs.get("hidden_states")
        positions = kwargs.get("position_embeddings")
        if type(tree_pass) is not TreePass or hidden is None or positions is None:
            return super().forward(*args, **kwargs)
        if not _serves(self, record, hidden, positions, tree_pass):
            return super().forward(*args, **kwargs)
        return _run(record, hidden.contiguous(), positions, tree_pass)


def _serves(
    layer: nn.Module,
    record: LayerRecord,
    hidden: torch.Tensor,
    positions: tuple[torch.Tensor, torch.Tensor],
    tree_pass: TreePass,
) -> bool:
    """Whether the parts are those that were found, ready for their kernels, and nobody listens in between."""
    modules, parts = layer._modules, record.parts
    for name, kind in PARTS.items():
        part = modules.get(name)
        if part is not parts[name] or not isinstance(part, kind) or not unhooked(part):
            return False
    for name in ("input_layernorm", "post_attention_layernorm"):
        if not still_fits(parts[name], record.records[name], hidden.shape[-1]):
            return False
    outer, inner = parts["self_attn"], parts["mlp"]
    last = (outer._modules.get("o_proj"), inner._modules.get("down_proj"))
    return (
        not layer.training
        and all(one is other and packed_now(one) for one, other in zip(last, record.last, strict=True))
        and gated_mlp.serves(inner, record.records["mlp"])
        and attention.serves(outer, record.records["self_attn"], hidden, positions, tree_pass)
    )


def _run(
    record: LayerRecord,
    hidden: torch.Tensor,
    positions: tuple[torch.Tensor, torch.Tensor],
    tree_pass: TreePass,
) -> torch.Tensor:
    batch, nodes, width = hidden.shape
    call = LayerCall.from_buffer_copy(record.template)
    held = _small_weights(record, call)
    out = torch.empty_like(hidden)
    size = nodes * width * hidden.element_size()
    own = record.records["self_attn"]
    for row, attention_call in enumerate(row_calls(record.parts["self_attn"], own, nodes, positions, tree_pass)):
        call.attention = attention_call
        call.x, call.out = hidden.data_ptr() + row * size, out.data_ptr() + row * size
        scratch = torch.empty(record.scratch(ctypes.byref(call)), dtype=torch.float32, device="cpu")
        call.scratch = scratch.data_ptr()
        record.kernel(ctypes.byref(call))
    del held
    assert batch == row + 1
    return out


def _small_weights(record: LayerRecord, call: LayerCall) -> list[torch.Tensor]:
    """Puts the addresses of norms' weights and biases, as they are now, into a call; returns what must outlive it."""
    held: list[torch.Tensor] = []
    for field, name in (("first_norm", "input_layernorm"), ("second_norm", "post_attention_layernorm")):
        weight: Any = record.parts[name]._parameters["weight"]
        getattr(call, field).weight = weight.data_ptr()
    joined = (record.records["self_attn"].joined, record.records["mlp"].joined)
    biases = [own.bias() for own in joined] + [last._parameters["bias"] for last in record.last]
    for field, bias in zip(("qkv", "gate_up", "o", "down"), biases, strict=True):
        if bias is not None:
            held.append(bias.detach().float().contiguous())
            getattr(call, field).bias = held[-1].data_ptr()
    return held


# --- is it what the kernel knows? -------------------------------------------------------------------------------------


@torch.inference_mode()
def fasten_decoder_layer(module: nn.Module) -> bool:
    """Gives a decoder layer the fast forward if it chains the four parts as native/layer.c does; says whether it did.

    The layer is run once with the outputs of attention and MLP replaced: what enters its parts and what leaves it must
    be the norms and sums that the kernel computes.
    """
    parts = {name: module._modules.get(name) for name in PARTS}
    if not swappable(module) or not all(isinstance(parts[name], kind) for name, kind in PARTS.items()):
        return False
    found: dict[str, Any] = parts
    records = {name: part.__dict__[RECORD] for name, part in found.items()}
    last = found["self_attn"]._modules.get("o_proj"), found["mlp"]._modules.get("down_proj")
    joined: JoinedLinear = records["self_attn"].joined
    library = kernels(joined.packed.dtype)
    if library is None or not all(isinstance(own, FrozenPackedLinear) for own in last):
        return False
    if not _chains(module, found, joined.packed.inputs, joined.packed.dtype):
        return False
    record = LayerRecord(
        kernel=library.layer,
        scratch=library.layer_scratch,
        parts=found,
        records=records,
        last=last,
        template=_template(records, last),
    )
    swap(module, FastDecoderLayer, record)
    return True


def _template(records: dict[str, Any], last: tuple[Any, Any]) -> LayerCall:
    call = LayerCall()
    own: AttentionRecord = records["self_attn"]
    inner: GatedRecord = records["mlp"]
    call.hidden, call.activation = own.joined.packed.inputs, inner.activation
    for field, name in (("first_norm", "input_layernorm"), ("second_norm", "post_attention_layernorm")):
        norm: NormRecord = records[name]
        setattr(call, field, NormCall(epsilon=norm.epsilon, style=norm.style))
    packed = (own.joined.packed, inner.joined.packed, last[0].packed, last[1].packed)
    for field, linear in zip(("qkv", "gate_up", "o", "down"), packed, strict=True):
        setattr(call, field, LinearCall(weight=linear.packed.data_ptr(), inputs=linear.inputs, outputs=linear.outputs))
    return call


def _chains(module: Any, parts: dict[str, Any], width: int, dtype: torch.dtype) -> bool:
    """Whether the layer is x + attention(norm(x)), and then that plus mlp(norm of that)."""
    if module.training:
        return False
    x, attended, inner = (sample(1, TOKENS, width, dtype=dtype, seed=seed) for seed in range(3))
    entered: list[torch.Tensor] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(args[0] if args else kwargs["hidden_states"])

    handles = [
        parts["self_attn"].register_forward_pre_hook(before, with_kwargs=True),
        parts["self_attn"].register_forward_hook(lambda *_: (attended, None)),
        parts["mlp"].register_forward_pre_hook(before, with_kwargs=True),
        parts["mlp"].register_forward_hook(lambda *_: inner),
    ]
    rotary = parts["self_attn"].__dict__[RECORD].template.rotary
    angles = sample(1, TOKENS, rotary, dtype=dtype)
    try:
        out = module(x, position_embeddings=(angles.cos(), angles.sin()), attention_mask=None)
    except Exception:  # a layer that wants something else is not one that the kernel knows
        return False
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(out, torch.Tensor) or len(entered) != 2 or not takes(out, dtype):
        return False
    middle = x + attended
    norms = parts["input_layernorm"](x), parts["post_attention_layernorm"](middle)
    pairs = ((entered[0], norms[0]), (entered[1], norms[1]), (out, middle + inner))
    return all(torch.equal(got, expected) for got, expected in pairs)
