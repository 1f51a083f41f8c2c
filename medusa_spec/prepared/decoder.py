"""A decoder whose tree passes run all layers in one call, wherever a module turns out to be one. Knows no models."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from medusa_spec.attention import TreePass
from medusa_spec.cache import SlabCache
from medusa_spec.delegation import TREE_ARGUMENT
from medusa_spec.errors import UnsupportedError
from medusa_spec.prepared.attention import AttentionRecord
from medusa_spec.prepared.decoder_layer import FastDecoderLayer, LayerRecord, run_layers, takes_pass
from medusa_spec.prepared.norm import FastNorm
from medusa_spec.prepared.swap import RECORD, Swapped, swap, swappable
from medusa_spec.prepared.watch import Watch
from medusa_spec.taps import listening, taps_of
from medusa_spec.tree import shape_of

SHAPE = shape_of((-1, 0, 0, 1))
"""Tree of the comparison."""

ASKED = ("output_hidden_states", "output_attentions")
"""Arguments and settings that ask for something in between."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderRecord:
    """What the fast forward needs.

    Attributes:
        layers: The records of the layers, in order.
        watch: Over the layers.
        cache_argument: Name of the forward's argument, and of the output's field, for the cache.
        output: The class of the forward's output.
    """

    layers: tuple[LayerRecord, ...]
    watch: Watch
    cache_argument: str
    output: Any


class FastDecoder(Swapped):
    """Mixed into a decoder of embeddings, rotary positions, layers and a norm; other passes are as before."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Token ids [1, M] to the plain decoder's output."""
        out = None if args else _in_one_call(self, self.__dict__[RECORD], kwargs)
        if out is not None:
            return out
        with listening():
            return super().forward(*args, **kwargs)


def _in_one_call(decoder: Any, record: DecoderRecord, kwargs: dict[str, Any]) -> Any:
    """The decoder's output; None if this pass is not for the kernel."""
    tree_pass, ids, positions = kwargs.get(TREE_ARGUMENT), kwargs.get("input_ids"), kwargs.get("position_ids")
    if type(tree_pass) is not TreePass or ids is None or positions is None:
        return None
    asked = any(kwargs.get(name, getattr(decoder.config, name, False)) for name in ASKED)
    if asked or kwargs.get(record.cache_argument) is not tree_pass.cache or kwargs.get("inputs_embeds") is not None:
        return None
    hidden = _hidden(decoder, record, ids, positions, tree_pass)
    if hidden is None:
        return None
    return record.output(last_hidden_state=hidden, **{record.cache_argument: tree_pass.cache})


def _hidden(
    decoder: Any, record: DecoderRecord, ids: torch.Tensor, positions: torch.Tensor, tree_pass: TreePass
) -> torch.Tensor | None:
    """The last hidden states [1, M, H]; None if a layer is not as it was found, or this pass is not for the kernel."""
    modules = decoder._modules
    if modules["layers"] is not record.watch.root or not record.watch.holds():
        return None
    hidden = modules["embed_tokens"](ids)
    angles = modules["rotary_emb"](hidden, position_ids=positions)
    if not takes_pass(record.layers[0], hidden, angles, tree_pass):  # the others are of its dtype and rotary size
        return None
    tapped = taps_of(modules["layers"])
    out, entered = run_layers(record.layers, hidden, angles, tree_pass, () if tapped is None else tapped.taps)
    if tapped is not None:
        for tap, states in zip(tapped.taps, entered, strict=True):
            tapped.put(tap, states)
    return modules["norm"](out)


# --- is it what the kernel knows? -------------------------------------------------------------------------------------


@torch.inference_mode()
def fasten_decoder(module: nn.Module) -> bool:
    """Gives a decoder the fast forward if it only chains its layers; says whether it did.

    The same tree pass behind the same short prompt is run both ways; the hidden states must be equal bit for bit.
    """
    stack = module._modules.get("layers")
    if not isinstance(stack, nn.ModuleList) or not len(stack):
        return False
    layers = list(stack)
    if not swappable(module) or not all(isinstance(layer, FastDecoderLayer) for layer in layers):
        return False
    kinds = {(own.joined.packed.dtype, own.template.rotary) for own in (_attention_of(layer) for layer in layers)}
    known = {"embed_tokens", "layers", "norm", "rotary_emb"}
    if len(kinds) > 1 or set(module._modules) != known or not isinstance(module._modules["norm"], FastNorm):
        return False
    parameters = inspect.signature(module.forward).parameters
    argument = "cache" if "cache" in parameters else "past_key_values"
    try:
        cache, ids, tree_pass = _prompted(module, argument)
        arguments = {"input_ids": ids, "position_ids": tree_pass.positions, argument: cache, TREE_ARGUMENT: tree_pass}
        plain: Any = module(**arguments, attention_mask=tree_pass.no_mask, use_cache=True)
        record = DecoderRecord(
            layers=tuple(layer.__dict__[RECORD] for layer in layers),
            watch=Watch(stack),
            cache_argument=argument,
            output=type(plain),
        )
        fast = _hidden(module, record, ids, tree_pass.positions, tree_pass)
    except (TypeError, ValueError, AttributeError, UnsupportedError):  # it wants something else
        return False
    if fast is None or not torch.equal(fast, plain.last_hidden_state):
        return False
    swap(module, FastDecoder, record)
    return True


def _attention_of(layer: nn.Module) -> AttentionRecord:
    record: LayerRecord = layer.__dict__[RECORD]
    return record.attention


def _prompted(module: Any, argument: str) -> tuple[SlabCache, torch.Tensor, TreePass]:
    """A cache behind a prompt of a few tokens, ids of a tree's nodes, and the pass."""
    count = module._modules["embed_tokens"].num_embeddings
    ids = (torch.arange(1, 6 + SHAPE.size, device="cpu") * 7919 % count).unsqueeze(0)
    cache = SlabCache(module.config)
    module(input_ids=ids[:, : -SHAPE.size], use_cache=True, **{argument: cache})
    cache.seal(SHAPE.size)
    cache.make_room(SHAPE.size)
    return cache, ids[:, -SHAPE.size :], TreePass(shape=SHAPE, cache=cache, device=torch.device("cpu"))
