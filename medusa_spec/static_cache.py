"""A cache whose shapes never change, for steps recorded once and replayed. Knows keys and values, no attention."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa_spec.cache import SlabCache
from medusa_spec.errors import UnsupportedError


class StaticLayer(CacheLayerMixin):
    """One layer's buffers, with the interface that Hugging Face models write nodes through.

    Sliding layers have the full capacity too; what their window does not reach is masked.
    """

    is_croppable = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, cache: "StaticCache", window: int | None, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.cache, self.window, self.is_sliding = cache, window, window is not None
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is left to do: buffers are there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the nodes' states [1, Hkv, N, D] behind the prefix and returns the whole buffers."""
        slots = self.cache.slots
        self.keys.index_copy_(2, slots, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, slots, value_states.to(self.values.dtype))
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the buffers that `update` returns."""
        return self.cache.capacity, 0

    def get_seq_length(self) -> int:
        """Tokens in the prefix, as far as the host knows."""
        return self.cache.known

    def get_max_length(self) -> int:
        """Slots."""
        return self.cache.capacity


class StaticCache(Cache):
    """One row's keys and values in buffers of fixed capacity, the length on the device.

    ```
    length 5, tree of 4 nodes      slots 0 1 2 3 4 | 0 1 2 3 | · · ·      update: index_copy at length + node
    keep the path (0, 2)           slots 0 1 2 3 4   0 2 | 2 3 | · ·      keep:   one gather and one scatter of D + 1
    ```

    Args:
        like: A sealed cache of the model: shapes, dtypes and windows are taken from it, its states are not.
        capacity: Slots.
    """

    layers: list[StaticLayer]  # type: ignore[assignment]

    def __init__(self, like: SlabCache, capacity: int) -> None:
        if any(like.chunk(layer) is not None for layer in range(len(like.layers))):
            raise UnsupportedError("passes of fixed shape know full and sliding attention, not attention in chunks")
        self.capacity = capacity
        self.kinds = like.kinds()
        self.known = 0  # length as the host has read it
        groups: dict[Any, list[int]] = {}
        for index, kind in enumerate(self.kinds):
            groups.setdefault(kind[:-1], []).append(index)
        self._slabs: list[torch.Tensor] = []  # each [layers, 1, Hkv, capacity, D]
        layers: dict[int, StaticLayer] = {}
        for (key_heads, key_dim, value_heads, value_dim, dtype, device), indices in groups.items():
            keys, values = (
                torch.zeros(len(indices), 1, heads, capacity, dim, dtype=dtype, device=device)
                for heads, dim in ((key_heads, key_dim), (value_heads, value_dim))
            )
            self._slabs += [keys, values]
            for place, index in enumerate(indices):
                layers[index] = StaticLayer(self, self.kinds[index][-1], keys[place], values[place])
        super().__init__(layers=[layers[index] for index in range(len(layers))])
        self.device: torch.device = self._slabs[0].device
        self.length = torch.zeros(1, dtype=torch.long, device=self.device)
        self.slots = self.length  # of the nodes under way

    def window(self, layer: int) -> int | None:
        """Window of an attention layer, None for full attention."""
        return self.layers[layer].window

    def fits(self, cache: SlabCache) -> bool:
        """Whether another request's states can stand in these buffers: same layers, dtypes, devices."""
        return self.kinds == cache.kinds()

    def place(self, nodes: int) -> None:
        """Before a pass: the slots of its nodes, right behind the prefix."""
        self.slots = self.length + torch.arange(nodes, device=self.device)

    def keep(self, path: torch.Tensor, count: torch.Tensor) -> None:
        """Makes accepted nodes part of the prefix.

        Args:
            path: [D + 1]: which node goes to each of the first D + 1 slots behind the prefix; a slot that names its own
                node stays as it is.
            count: [1], nodes accepted, the root included.
        """
        if path.numel() > 1:  # a lone root lies where it belongs
            targets, sources = self.slots[: path.numel()], self.length + path
            for slab in self._slabs:
                slab.index_copy_(3, targets, slab.index_select(3, sources))
        self.length.add_(count)

    def cut(self, length: int) -> None:
        """Sets the length; what lies behind it is forgotten."""
        self.known = length
        self.length.fill_(length)

    def load(self, states: Sequence[tuple[torch.Tensor, torch.Tensor]], length: int) -> None:
        """Takes over states, a pair [1, Hkv, held, D] per layer that ends with token `length` - 1."""
        for layer, pair in zip(self.layers, states, strict=True):
            for buffer, held in zip((layer.keys, layer.values), pair, strict=True):
                buffer[:, :, length - held.shape[2] : length].copy_(held)
        self.cut(length)

    def states(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of what is held, a pair [1, Hkv, held, D] per layer; of a sliding layer what its window reaches."""
        pairs = []
        for layer in self.layers:
            first = 0 if layer.window is None else max(0, self.known - layer.window + 1)
            pairs.append((layer.keys[:, :, first : self.known], layer.values[:, :, first : self.known]))
        return pairs
