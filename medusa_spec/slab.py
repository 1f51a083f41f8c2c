"""All layers of one kind and shape in one tensor, a length per row. Knows no cache of Hugging Face's and no models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from medusa_spec.cache import SlabLayer

ALIGNMENT = 64
"""Capacities are multiples of this many slots."""


def aligned(slots: int) -> int:
    """The next capacity that holds so many slots."""
    return -(-slots // ALIGNMENT) * ALIGNMENT


def with_spare(slots: int) -> int:
    """A capacity for so many slots, and for as many nodes as a tree usually has."""
    return aligned(slots + ALIGNMENT)


@dataclass(kw_only=True, eq=False)
class Slab:
    """All layers of one kind and shape in one tensor: [layers, B, Hkv, capacity, D], keys and values apart.

    Slot 0 of row b holds position `bases[b]`: full layers keep 0 there, sliding ones move their window back to the
    front when the slab is full, which copies a window once per window of tokens.
    """

    layers: "list[SlabLayer]"
    window: int | None
    keys: torch.Tensor
    values: torch.Tensor
    bases: list[int]

    @property
    def capacity(self) -> int:
        """Slots of each row."""
        return self.keys.shape[3]

    def used(self, lengths: Sequence[int]) -> list[int]:
        """Slots that each row's prefix fills."""
        return [length - base for length, base in zip(lengths, self.bases, strict=True)]

    def make_room(self, lengths: Sequence[int], nodes: Sequence[int]) -> None:
        """Makes as many free slots behind each row's prefix, forgetting what no window reaches, or growing."""
        if self._need(lengths, nodes) <= self.capacity:
            return
        if self.window is not None:
            self._slide(lengths)
        need = self._need(lengths, nodes)
        if need > self.capacity or (self.window is not None and need > self.capacity // 2):
            # A sliding slab of twice its content slides rarely; a full one grows geometrically.
            self._grow(2 * max(need, self.capacity if self.window is None else 0))

    def _need(self, lengths: Sequence[int], nodes: Sequence[int]) -> int:
        return max(used + count for used, count in zip(self.used(lengths), nodes, strict=True))

    def _slide(self, lengths: Sequence[int]) -> None:
        assert self.window is not None
        for row, (length, base) in enumerate(zip(lengths, self.bases, strict=True)):
            first = max(base, length - self.window + 1)
            for slab in (self.keys, self.values):
                slab[:, row, :, : length - first] = slab[:, row, :, first - base : length - base].clone()
            self.bases[row] = first

    def _grow(self, slots: int) -> None:
        slots = aligned(slots)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:3], slots, old.shape[4])
            new[:, :, :, : old.shape[3]] = old
            setattr(self, name, new)
        self.hand_out()

    def hand_out(self) -> None:
        """Gives each layer its view [B, Hkv, capacity, D]."""
        for index, layer in enumerate(self.layers):
            layer.keys, layer.values = self.keys[index], self.values[index]

    def move(self, row: int, sources: torch.Tensor, first: int) -> None:
        """Copies the slots `sources` of a row, of all layers at once, to the slots from `first` on."""
        for slab in (self.keys, self.values):
            index = sources.to(slab.device)
            slab[:, row, :, first : first + index.numel()] = slab[:, row].index_select(2, index)


def stacked(states: list[torch.Tensor], capacity: int) -> torch.Tensor:
    """Layers' states [B, Hkv, T, D] in one slab [layers, B, Hkv, capacity, D]."""
    batch, heads, length, dim = states[0].shape
    slab = states[0].new_zeros(len(states), batch, heads, capacity, dim)
    for index, layer_states in enumerate(states):
        slab[index, :, :, :length] = layer_states
    return slab
