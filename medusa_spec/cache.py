"""Keys and values of prefix and tree. The only file that reads Hugging Face caches; knows no attention, no models."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from medusa_spec.errors import ConfigError, UnsupportedError
from medusa_spec.layer_kinds import layer_chunks, layer_sources, layer_windows
from medusa_spec.slab import Slab, stacked, with_spare

LONGEST_RESERVE = 4096
"""Most slots kept free at the start, unless the prompt is longer: who allows a million tokens seldom gets them."""


def plain_cache(model: Any) -> Any:
    """The cache with which plain generation of a model begins; None where the model makes its own."""
    makes_own = not getattr(model, "_supports_default_dynamic_cache", lambda: True)()
    return None if makes_own else DynamicCache(config=model.config.get_text_config(decoder=True))


class SlabLayer(CacheLayerMixin):
    """One layer's part of a `SlabCache`, with the interface that Hugging Face models write through.

    Outside a tree pass it appends, as a prompt is read. Inside one it writes the nodes behind each row's prefix and
    leaves the lengths alone; `SlabCache.keep` then makes the accepted ones part of the prefix.
    """

    is_croppable = False
    # None until the first states; nothing reads them before.
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, cache: "SlabCache", window: int | None, chunk: int | None = None) -> None:
        super().__init__()
        self.cache = cache
        self.window, self.chunk = window, chunk
        self.is_sliding = window is not None
        self.slab: Slab | None = None
        self.seen = 0  # tokens of the prompt that this layer has read, while it is not yet in a slab

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Takes shape, dtype and device from the first states."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new states and returns what attention reads, [B, Hkv, S, D].

        Args:
            key_states: [B, Hkv, T, D] of a plain pass; of a tree pass [1, Hkv, M, D], the nodes of all rows.
            value_states: As key_states.
            *args: Not read.
            **kwargs: Not read.
        """
        if self.slab is not None:
            return self._write_nodes(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
        else:
            self.keys = torch.cat([self.keys, key_states], dim=2)
            self.values = torch.cat([self.values, value_states], dim=2)
        self.seen += key_states.shape[2]
        keys, values = self.keys, self.values
        if self.window is not None:
            self.keys, self.values = (states[:, :, -self.window + 1 :] for states in (keys, values))
        return keys, values

    def _write_nodes(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start, stop = 0, 0
        assert self.slab is not None
        assert sum(self.cache.nodes) == keys.shape[2], "a tree pass that `make_room` was not told of"
        for row, used in enumerate(self.slab.used(self.cache.lengths)):
            count = self.cache.nodes[row]
            part, place = slice(start, start + count), slice(used, used + count)
            self.keys[row, :, place], self.values[row, :, place] = keys[0, :, part], values[0, :, part]
            start, stop = part.stop, max(stop, place.stop)
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the keys that `update` returns for a plain pass of `query_length` tokens."""
        held = self.seen if self.window is None else min(self.seen, self.window - 1)
        return held + query_length, self.seen - held

    def get_seq_length(self) -> int:
        """Tokens read so far."""
        return self.seen if self.slab is None else max(self.cache.lengths)

    def get_max_length(self) -> int:
        """-1: no limit, the slab grows."""
        return -1


class SlabCache(Cache):
    """The cache of one decoding: a length per row, one slab per layer shape, nodes written in place.

    ```
    prefix of 5, tree of 4 nodes      slots 0 1 2 3 4 | 0 1 2 3 |        capacity grows geometrically
    keep the path (0, 2)              slots 0 1 2 3 4   5 6 |            node 0 stays, node 2 moves to slot 6
    ```

    Args:
        config: Text decoder config of the target.
        batch: Rows.

    Raises:
        UnsupportedError: For layer kinds that hold no tree; see `layer_windows`.
    """

    layers: list[SlabLayer]  # type: ignore[assignment]
    nodes: list[int]  # of each row, in the pass that `make_room` made room for

    def __init__(self, config: Any, batch: int = 1) -> None:
        kinds = zip(layer_windows(config), layer_chunks(config), strict=False)
        super().__init__(layers=[SlabLayer(self, window, chunk) for window, chunk in kinds])
        self.lengths = [0] * batch
        self._sources = layer_sources(config)
        self.nodes = [0] * batch
        self._slabs: list[Slab] = []

    def _layer(self, layer: int) -> SlabLayer:
        """The layer whose keys and values an attention layer reads: its own as a rule."""
        return self.layers[self._sources.get(layer, layer)]

    def window(self, layer: int) -> int | None:
        """Window of an attention layer, None for full attention."""
        return self._layer(layer).window

    def chunk(self, layer: int) -> int | None:
        """Width of the chunks of an attention layer, None where it attends beyond its own."""
        return self._layer(layer).chunk

    def kind(self, layer: int) -> int:
        """Names the slab of an attention layer: layers of the same one see the same slots."""
        return id(self._layer(layer).slab)

    def base(self, layer: int, row: int) -> int:
        """Position that slot 0 of a row holds at a layer."""
        slab = self._layer(layer).slab
        assert slab is not None, "a tree pass before `seal`"
        return slab.bases[row]

    def holds(self, dtype: torch.dtype) -> bool:
        """Whether all keys and values lie in slabs of this dtype, on the CPU and alike in shape."""
        slabs = self._slabs
        return bool(slabs) and all(
            slab.keys.dtype == dtype and slab.keys.is_cpu and slab.keys.shape == slab.values.shape for slab in slabs
        )

    def buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, [B, Hkv, capacity, D], for who writes the nodes itself: from slot `end` on."""
        return self._layer(layer).keys, self._layer(layer).values

    def seal(self, reserve: int, unread: int = 0) -> None:
        """Moves the states of the prompt into slabs; from then on every pass is a tree pass.

        Args:
            reserve: Tokens expected to follow; a hint, the slabs grow when it was too small.
            unread: Tokens of the prompt that are still to be read, by tree passes.
        """
        reserve = unread + min(reserve, max(LONGEST_RESERVE, self.layers[0].seen + unread))
        groups: dict[Any, list[SlabLayer]] = {}
        for layer in self.layers:
            shape = (layer.keys.shape, layer.values.shape, layer.window, layer.chunk, layer.dtype, layer.device)
            groups.setdefault(shape, []).append(layer)
        self.lengths = [self.layers[0].seen] * len(self.lengths)
        for layers in groups.values():
            window, held = layers[0].window, layers[0].keys.shape[2]
            room = held + reserve if window is None else min(held + reserve, 2 * window)
            capacity = with_spare(room)
            slab = Slab(
                layers=layers,
                window=window,
                keys=stacked([layer.keys for layer in layers], capacity),
                values=stacked([layer.values for layer in layers], capacity),
                bases=[length - held for length in self.lengths],
            )
            slab.hand_out()
            for layer in layers:
                layer.slab = slab
            self._slabs.append(slab)

    def make_room(self, nodes: int | Sequence[int]) -> None:
        """Before a tree pass: free slots for its nodes behind every row's prefix at every layer.

        Args:
            nodes: As many for every row, or a number for each; 0 for a row that takes no part.
        """
        self.nodes = [nodes] * len(self.lengths) if isinstance(nodes, int) else list(nodes)
        for slab in self._slabs:
            slab.make_room(self.lengths, self.nodes)

    def keep(self, row: int, path: Sequence[int]) -> None:
        """Makes the nodes of `path` (root first) part of a row's prefix.

        Nodes that already lie where they belong are not copied: the likeliest chain is laid out first.
        """
        settled = 0
        while settled < len(path) and path[settled] == settled:
            settled += 1
        moved = path[settled:]
        if moved:
            for slab in self._slabs:
                used = slab.used(self.lengths)[row]
                slab.move(row, torch.tensor([used + node for node in moved]), used + settled)
        self.lengths[row] += len(path)

    # --- rows that come and go ----------------------------------------------------------------------------------------

    def empty(self, row: int) -> None:
        """Forgets a row of a sealed cache, which another text may fill."""
        self.cut(row, 0)

    def cut(self, row: int, length: int) -> int:
        """Forgets what a row of a sealed cache holds behind its first `length` tokens, so that another text may go on.

        Returns:
            Tokens left: none where a window has let go of the first ones.

        Raises:
            ValueError: If it does not hold so many.
        """
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"length must be in 0..{self.lengths[row]}, what row {row} holds, got {length}")
        left = length if not any(slab.bases[row] for slab in self._slabs) else 0
        self.lengths[row] = left
        for slab in self._slabs:
            slab.bases[row] = 0
        return left

    @classmethod
    def joined(cls, caches: "Sequence[SlabCache]", config: Any, reserve: int) -> "SlabCache":
        """One sealed cache of several rows, a copy of the first row of each of these sealed caches of one model.

        Args:
            caches: The rows; the same one may stand for several.
            config: As for the class.
            reserve: Tokens expected to follow in each row; a hint.
        """
        whole = cls(config, batch=len(caches))
        whole.lengths = [cache.lengths[0] for cache in caches]
        for slabs in zip(*(cache._slabs for cache in caches), strict=True):
            of = slabs[0]
            held = [slab.used(cache.lengths)[0] for slab, cache in zip(slabs, caches, strict=True)]
            room = max(held) + min(reserve, LONGEST_RESERVE if of.window is None else of.window)
            capacity = with_spare(room)
            layers = [whole.layers[caches[0].layers.index(layer)] for layer in of.layers]
            keys, values = (
                part.new_zeros(part.shape[0], len(caches), part.shape[2], capacity, part.shape[4])
                for part in (of.keys, of.values)
            )
            for row, (slab, count) in enumerate(zip(slabs, held, strict=True)):
                keys[:, row, :, :count] = slab.keys[:, 0, :, :count]
                values[:, row, :, :count] = slab.values[:, 0, :, :count]
            own = Slab(
                layers=layers, window=of.window, keys=keys, values=values, bases=[slab.bases[0] for slab in slabs]
            )
            for layer in layers:
                layer.lazy_initialization(keys, values)
                layer.slab = own
            own.hand_out()
            whole._slabs.append(own)
        return whole

    @contextmanager
    def only(self, row: int) -> Iterator["SlabCache"]:
        """Within it, one row of a sealed cache as a cache of its own, in the same memory, which must suffice."""
        view = SlabCache.__new__(SlabCache)
        Cache.__init__(view, layers=[SlabLayer(view, layer.window, layer.chunk) for layer in self.layers])
        view.lengths, view.nodes, view._slabs = [self.lengths[row]], [0], []
        view._sources = self._sources
        places = {id(layer): index for index, layer in enumerate(self.layers)}
        for slab in self._slabs:
            layers = [view.layers[places[id(layer)]] for layer in slab.layers]
            part = slice(row, row + 1)
            own = replace(
                slab, layers=layers, keys=slab.keys[:, part], values=slab.values[:, part], bases=slab.bases[part]
            )
            for layer, whole in zip(layers, slab.layers, strict=True):
                layer.slab, layer.dtype, layer.device, layer.is_initialized = own, whole.dtype, whole.device, True
            own.hand_out()
            view._slabs.append(own)
        yield view
        assert all(own.capacity == slab.capacity for own, slab in zip(view._slabs, self._slabs, strict=True)), "it grew"
        self.lengths[row] = view.lengths[0]
        for own, slab in zip(view._slabs, self._slabs, strict=True):
            slab.bases[row] = own.bases[0]

    # --- exchange with caches of fixed capacity -----------------------------------------------------------------------

    def kinds(self) -> list[tuple[Any, ...]]:
        """Per layer (key heads, key size, value heads, value size, dtype, device, window)."""
        return [
            (*layer.keys.shape[1::2], *layer.values.shape[1::2], layer.dtype, layer.device, layer.window)
            for layer in self.layers
        ]

    def states(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Row 0's states, a view [1, Hkv, held, D] of keys and of values per layer; they end at its length."""
        held = [self.lengths[0] - self.base(index, 0) for index in range(len(self.layers))]
        return [
            (layer.keys[:1, :, :count], layer.values[:1, :, :count])
            for layer, count in zip(self.layers, held, strict=True)
        ]

    def release(self) -> None:
        """Frees the states, which another cache has taken over; `renew` must follow before this one is read."""
        for slab in self._slabs:
            slab.keys, slab.values = slab.keys[:, :, :, :0].clone(), slab.values[:, :, :, :0].clone()
            slab.hand_out()

    def renew(self, states: Sequence[tuple[torch.Tensor, torch.Tensor]], length: int) -> None:
        """Holds these states in place of its own, and is sealed again.

        Args:
            states: Keys and values [B, Hkv, held, D] per layer, of rows of one length.
            length: Tokens read; the states are those of the last ones.
        """
        self._slabs = []
        for layer, (keys, values) in zip(self.layers, states, strict=True):
            layer.slab, layer.is_initialized = None, False
            layer.update(keys, values)
            layer.seen = length
        self.seal(0)

    # --- exchange with Hugging Face's caches --------------------------------------------------------------------------

    def load(self, cache: Any) -> None:
        """Takes over the states of a `DynamicCache`, before anything was read.

        Raises:
            UnsupportedError: If `cache` is of another class or holds other layers.
            ConfigError: If it is another model's, or holds another number of rows.
        """
        if type(cache) is not DynamicCache or cache.offloading:
            kind = type(cache).__name__ + (" with offloading" if getattr(cache, "offloading", False) else "")
            raise UnsupportedError(f"cache must be a transformers DynamicCache, got {kind}; pass one, or none")
        if cache.get_seq_length() == 0:
            return
        others: list[Any] = cache.layers
        if len(others) not in (len(self.layers), len(self.layers) + len(self._sources)):
            raise ConfigError(f"cache must be this model's, got one of {len(others)} for {len(self.layers)} layers")
        if len(others[0].keys) != len(self.lengths):
            raise ConfigError(f"cache must hold {len(self.lengths)} row, got {len(others[0].keys)} rows")
        for index, (own, other) in enumerate(zip(self.layers, others[: len(self.layers)], strict=True)):
            if own.chunk is not None:
                raise UnsupportedError(
                    f"cache layer {index} keeps the end of a text for attention in chunks of {own.chunk}, which is not "
                    "taken over; pass the whole text and no cache"
                )
            if type(other) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise UnsupportedError(f"cache layer {index} is a {type(other).__name__}; keys and values are needed")
            own.update(other.keys, other.values)
            own.seen = other.get_seq_length()

    def export(self, config: Any, into: Any = None, padding: int = 0) -> Any:
        """Row 0's states as a `DynamicCache`, as `generate` returns it; `into`, the user's, is brought up to date.

        Padding before the text, which is not read here, stands in it as zeros: plain decoding masks it.
        """
        cache: Any = DynamicCache(config=config) if into is None else into
        if not cache.layers:  # DynamicCache() makes them as they come, all of them full
            cache.layers = DynamicCache(config=config).layers
        length = self.lengths[0] + padding
        for index, layer in enumerate(self.layers):
            held = self.lengths[0] - self.base(index, 0)
            states = [states[:1, :, :held].clone() for states in (layer.keys, layer.values)]
            if padding and held == self.lengths[0]:
                states, held = [pad(part, (0, 0, padding, 0)) for part in states], held + padding
            new = length - cache.layers[index].get_seq_length()
            if new <= held:
                cache.layers[index].update(*(s[:, :, held - new :] for s in states))
            else:  # a sliding layer that has forgotten its beginning
                assert layer.window is not None
                other = cache.layers[index] = DynamicSlidingWindowLayer(layer.window)
                other.update(*states)
                other.cumulative_length = length
        return cache
