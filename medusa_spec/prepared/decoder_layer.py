"""Decoder layers whose tree passes run in one call, wherever a module turns out to be one. Knows no models.

The parts are modules that were given fast forwards before; here they are chained without returning to Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from medusa_spec.attention import TreePass
from medusa_spec.delegation import TREE_ARGUMENT
from medusa_spec.prepared import attention
from medusa_spec.prepared.attention import (
    Angles,
    AttentionRecord,
    FastAttention,
    point_to_sinks,
    pointer,
)
from medusa_spec.prepared.gated_mlp import FastGatedMlp, GatedRecord
from medusa_spec.prepared.joined import JoinedLinear
from medusa_spec.prepared.kernels import LayerCall, LinearCall, NormCall, kernels, takes
from medusa_spec.prepared.norm import FastNorm, NormRecord
from medusa_spec.prepared.packed_layer import FrozenPackedLinear
from medusa_spec.prepared.packed_linear import PackedLinear
from medusa_spec.prepared.swap import RECORD, Swapped, sample, swap, swappable
from medusa_spec.prepared.watch import Watch

PARTS: dict[str, type[nn.Module]] = {
    "input_layernorm": FastNorm,
    "self_attn": FastAttention,
    "post_attention_layernorm": FastNorm,
    "mlp": FastGatedMlp,
}
"""Attributes of the four parts, in the order in which they run."""

PRODUCTS = ("qkv", "gate_up", "o", "down")
"""Fields of a `LayerCall` that are linear layers."""

TOKENS = 3
"""Tokens of the comparison."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerRecord:
    """What the fast forward needs.

    Attributes:
        attention: The attention's own record.
        parts: The four parts, by attribute.
        products: The linear layers, by field of a `LayerCall`.
        biased: Whether any of them has a bias.
        template: A call with all sizes and the addresses of weights.
        watch: Over the layer.
    """

    attention: AttentionRecord
    parts: dict[str, nn.Module]
    products: dict[str, JoinedLinear | FrozenPackedLinear]
    template: LayerCall
    watch: Watch
    biased: bool


class FastDecoderLayer(Swapped):
    """Mixed into a decoder layer; passes without a tree are as before."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """[1, M, H] to the same shape."""
        tree_pass, record = kwargs.get(TREE_ARGUMENT), self.__dict__[RECORD]
        hidden = args[0] if args else kwargs.get("hidden_states")
        positions = kwargs.get("position_embeddings")
        if type(tree_pass) is not TreePass or hidden is None or positions is None:
            return super().forward(*args, **kwargs)
        if not takes_pass(record, hidden, positions, tree_pass) or not record.watch.holds():
            return super().forward(*args, **kwargs)
        return run_layers([record], hidden, positions, tree_pass)[0]


def takes_pass(
    record: LayerRecord,
    hidden: torch.Tensor,
    positions: tuple[torch.Tensor, torch.Tensor],
    tree_pass: TreePass,
) -> bool:
    """Whether the kernel reads these states, angles and this cache."""
    return attention.takes_pass(record.attention, hidden, positions, tree_pass)


def run_layers(
    records: Sequence[LayerRecord],
    hidden: torch.Tensor,
    positions: tuple[torch.Tensor, torch.Tensor],
    tree_pass: TreePass,
    taps: Sequence[int] = (),
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Consecutive layers in one call.

    Args:
        records: The layers, in order.
        hidden: [1, M, H].
        positions: Cosines and sines, each [1, M, rotary].
        tree_pass: The pass.
        taps: Places in `records` of the layers whose inputs are asked for.

    Returns:
        What leaves the last layer, and what entered those of `taps`, each [1, M, H].
    """
    found = kernels(hidden.dtype)
    assert found is not None
    hidden, held = hidden.contiguous(), list[Any]()
    out, count, angles = torch.empty_like(hidden), len(records), Angles(positions)
    tapped = [torch.empty_like(hidden) for _ in taps]
    calls = (LayerCall * count)(*(record.template for record in records))
    for tap, states in zip(taps, tapped, strict=True):
        calls[tap].tap = states.data_ptr()
    point_to = pointer(tree_pass, held)
    for call, record in zip(calls, records, strict=True):
        point_to_sinks(call.attention, record.attention, held)
        if record.biased:
            _point_to_biases(call, record, held)
        layer: Any = record.parts["self_attn"]
        point_to(call.attention, tree_pass, layer.layer_idx, angles)
    scratch = torch.empty(found.layers_scratch(calls, count), dtype=torch.float32, device="cpu")
    found.layers(calls, count, hidden.data_ptr(), out.data_ptr(), scratch.data_ptr())
    return out, tapped


def _point_to_biases(call: LayerCall, record: LayerRecord, held: list[torch.Tensor]) -> None:
    """Puts the addresses of biases, as they are now and as floats, into a call; `held` gets what must outlive it."""
    for name, product in record.products.items():
        bias = _bias(product)
        if bias is not None:
            held.append(bias.detach().float().contiguous())
            getattr(call, name).bias = held[-1].data_ptr()


def _bias(product: JoinedLinear | FrozenPackedLinear) -> torch.Tensor | None:
    return product.bias() if isinstance(product, JoinedLinear) else product.bias


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
    own, inner = found["self_attn"].__dict__[RECORD], found["mlp"].__dict__[RECORD]
    last = found["self_attn"]._modules.get("o_proj"), found["mlp"]._modules.get("down_proj")
    if not all(type(layer) is FrozenPackedLinear for layer in last):
        return False
    if not _chains(module, found, own.joined.packed.inputs, own.joined.packed.dtype):
        return False
    products = dict(zip(PRODUCTS, (own.joined, inner.joined, *last), strict=True))
    record = LayerRecord(
        attention=own,
        parts=found,
        products=products,
        template=_template(found, own, inner, products),
        watch=Watch(module),
        biased=any(_bias(product) is not None for product in products.values()),
    )
    swap(module, FastDecoderLayer, record)
    return True


def _template(parts: dict[str, Any], own: AttentionRecord, inner: GatedRecord, products: dict[str, Any]) -> LayerCall:
    call = LayerCall()
    call.hidden, call.activation, call.attention = own.joined.packed.inputs, inner.activation, own.template
    for field, name in (("first_norm", "input_layernorm"), ("second_norm", "post_attention_layernorm")):
        norm: NormRecord = parts[name].__dict__[RECORD]
        weight = parts[name].weight.data_ptr()
        setattr(call, field, NormCall(weight=weight, epsilon=norm.epsilon, style=norm.style))
    for field, product in products.items():
        packed: PackedLinear = product.packed
        weight = packed.packed.data_ptr()
        setattr(call, field, LinearCall(weight=weight, inputs=packed.inputs, outputs=packed.outputs))
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
