"""Bytes that heads and caches take, and bytes that are free. Knows shapes, no decoding."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medusa_spec.cache import SlabCache


@dataclass(frozen=True, kw_only=True)
class LayerStates:
    """Keys and values of one layer.

    Attributes:
        bytes_per_token: Of both.
        window: Tokens that it keeps at most; None for all.
    """

    bytes_per_token: int
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes that heads and a text take.

    Attributes:
        heads: Of the heads' weights, which are loaded.
        per_token: Of the target's cache, for each token of a short text.
        heads_per_token: Of what the heads keep of the text, for each token.
        context: Tokens of the text asked about.
        cache: Of both for such a text.
        free: On the device now; None if unknown.
    """

    heads: int
    per_token: int
    heads_per_token: int
    context: int
    cache: int
    free: int | None

    @property
    def fits(self) -> bool | None:
        """Whether such a text fits beside what is loaded; None if unknown."""
        return None if self.free is None else self.cache <= self.free


def layer_states(cache: Any) -> list[LayerStates]:
    """What the layers of a cache keep of a token; the cache must have read one.

    Of states of other forms: what grows with the text, and what does not, as a layer that sees one token.
    """
    if not isinstance(cache, SlabCache):
        constant, growing = cache.bytes_held()
        return [LayerStates(bytes_per_token=growing), LayerStates(bytes_per_token=constant, window=1)]
    return [
        LayerStates(bytes_per_token=(key_heads * key_size + value_heads * value_size) * dtype.itemsize, window=window)
        for key_heads, key_size, value_heads, value_size, dtype, _, window in cache.kinds()
    ]


def cache_bytes(layers: Sequence[LayerStates], context: int) -> int:
    """Bytes of a text of so many tokens, the room that buffers keep free not counted."""
    return sum(
        layer.bytes_per_token * (context if layer.window is None else min(context, layer.window)) for layer in layers
    )


def module_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, shared ones counted once."""
    tensors = {tensor.data_ptr(): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on the device; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # no Linux
        return None
    known = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return int(known["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in known else None
