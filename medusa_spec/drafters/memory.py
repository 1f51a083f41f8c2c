"""Keys and values of the heads' own layers: the text that they have read, and behind it the draft. Knows no layer."""

from collections.abc import Sequence

import torch

from medusa_spec.heads import Room, View, attention

ROOM = 64
"""Slots by which a memory is larger than what it must hold at first."""


class TextMemory:
    """Keys and values of one layer, one row of the batch; it grows geometrically.

    ```
    text of 4, then a root's children and grandchildren      slots 0 1 2 3 | 4 5 | 6 7 8      length 4, end 9
    ```

    Attributes:
        length: Slots of the text.
        end: Slots in use; what lies behind the text is a draft's, and is dropped by `drop_draft`.
        places: Place in the text of every slot, as views note it.
    """

    def __init__(self) -> None:
        self.length = self.end = 0
        self.keys = self.values = torch.empty(0)
        self.places: list[int] = []

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values of a slot; 0 before there are any."""
        parts = [part for part in (self.keys, self.values) if part.ndim == 4]
        return sum(part.shape[1] * part.shape[3] * part.element_size() for part in parts)

    def add(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends rows [1, Hkv, M, D]; all keys and values so far, views [1, Hkv, end, D]."""
        stop = self.end + key.shape[2]
        self.make_room(key, value, stop)
        self.keys[:, :, self.end : stop] = key
        self.values[:, :, self.end : stop] = value
        self.end = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def claim(self, rows: int, heads: int, dim: int, dtype: torch.dtype) -> int:
        """Counts M rows in whose keys and values somebody else writes into the buffers; the first of their slots."""
        start, stop = self.end, self.end + rows
        if self.keys.ndim != 4 or stop > self.keys.shape[2]:
            like = torch.empty(1, heads, 0, dim, dtype=dtype, device="cpu")
            self.make_room(like, like, stop)
        self.end = stop
        return start

    def make_room(self, key: torch.Tensor, value: torch.Tensor, slots: int) -> None:
        """Makes the buffers hold `slots`, of the shapes of `key` and `value` [1, Hkv, M, D]."""
        if self.keys.ndim == 4 and slots <= self.keys.shape[2]:
            return
        for name, like in (("keys", key), ("values", value)):
            old = getattr(self, name)
            new = like.new_zeros(*like.shape[:2], 2 * slots + ROOM, like.shape[3])
            if self.end:
                new[:, :, : self.end] = old[:, :, : self.end]
            setattr(self, name, new)

    def keep_all(self) -> None:
        """What is there is text."""
        self.length = self.end

    def drop_draft(self) -> None:
        """Only the text remains."""
        self.end = self.length


class TextView(View):
    """A pass of a layer over new rows.

    Args:
        memory: What came before.
        positions: The rows' places in the text.
        mask: Bool [M, end + M]: the slots that each row sees, its own among them.
    """

    def __init__(self, memory: TextMemory, positions: Sequence[int], mask: torch.Tensor) -> None:
        self.memory, self.mask, self._rows = memory, mask, positions
        self.positions = torch.tensor([positions], device=mask.device)
        self.last = max(positions, default=0)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `View`; B is 1."""
        return attention(query, *self.update(key, value), self.mask)

    def room(self, heads: int, dim: int, dtype: torch.dtype) -> Room | None:
        """See `View`; on the CPU."""
        if not self.mask.is_cpu:
            return None
        memory = self.memory
        start = memory.claim(len(self.mask), heads, dim, dtype)
        return Room(keys=memory.keys, values=memory.values, start=start, mask=self.mask.contiguous(), last=self.last)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `View`."""
        self.memory.places[self.memory.end :] = self._rows
        return self.memory.add(key, value)

    def seen(self) -> torch.Tensor:
        """See `View`."""
        return self.mask

    def places(self) -> torch.Tensor:
        """See `View`."""
        return torch.tensor([*self.memory.places[: self.memory.end], *self._rows], device=self.mask.device)


def text_mask(start: int, rows: int, gap: int, device: torch.device) -> torch.Tensor:
    """What rows of the text see: slots up to their own less `gap`, and their own.

    ```
    start 2, 2 rows      gap 0   ■ ■ ■ ·      gap 2   ■ · ■ ·
                                 ■ ■ ■ ■              ■ ■ · ■
    ```

    Returns:
        Bool [rows, start + rows].
    """
    own = torch.arange(start, start + rows, device=device)[:, None]
    slots = torch.arange(start + rows, device=device)[None, :]
    return (slots <= own - gap) | (slots == own)


def draft_mask(length: int, end: int, seen: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """What rows of a draft see: the text, slots of the draft before them, and themselves.

    ```
    text of 2, one slot behind it, rows that see it and not      ■ ■ ■ ■ ·
                                                                 ■ ■ · · ■
    ```

    Args:
        length: Slots of the text.
        end: Slots in use.
        seen: For each row the slots of the draft that it sees.
        device: Of the mask.

    Returns:
        Bool [rows, end + rows].
    """
    rows, width = len(seen), end + len(seen)
    mask = bytearray(
        (b"\1" * length + bytes(width - length)) * rows
    )  # made at every level: torch takes four times longer
    for row, slots in enumerate(seen):
        for slot in (*slots, end + row):
            mask[row * width + slot] = 1
    return torch.frombuffer(mask, dtype=torch.bool).view(rows, width).to(device)
