"""What the rows of one pass of an attending layer see: keys of the text and of rows before. Knows no layer."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class Room:
    """Slots that a layer fills by itself, behind those that its rows see.

    Attributes:
        keys: [1, Hkv, capacity, D], contiguous; the rows' go to the slots from `start` on.
        values: The same.
        start: Slots in use before.
        mask: Bool [T, start + T], contiguous: the slots that each row sees, its own among them.
        last: The largest of the rows' positions.
    """

    keys: torch.Tensor
    values: torch.Tensor
    start: int
    mask: torch.Tensor
    last: int


class View(ABC):
    """Attention of one pass, as a layer asks for it.

    Attributes:
        positions: Int64 [B, T], the place in the text of each row of the pass.
    """

    positions: torch.Tensor

    @abstractmethod
    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention of the rows, whose keys and values later passes will see too.

        Args:
            query: [B, Hq, T, D], rotated.
            key: [B, Hkv, T, D], rotated.
            value: [B, Hkv, T, D].

        Returns:
            [B, T, Hq * D].
        """

    @abstractmethod
    def update(
        self, key: torch.Tensor, value: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds keys and values of this pass, for layers that attend by themselves; as a Hugging Face cache has it.

        Returns:
            All keys and values so far, [B, Hkv, S, D].
        """

    @abstractmethod
    def seen(self) -> torch.Tensor:
        """Bool [T, S]: which of those keys each row of this pass sees."""

    @abstractmethod
    def places(self) -> torch.Tensor:
        """Int64 [S]: their places in the text, for layers with a window."""

    def room(self, heads: int, dim: int, dtype: torch.dtype) -> Room | None:
        """Room for the rows' keys and values, to be filled instead of calling `attend`; None where there is none.

        Args:
            heads: Hkv.
            dim: D.
            dtype: Of keys and values.
        """
        return None


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention with shared key heads under a mask.

    Args:
        query: [B, Hq, T, D].
        key: [B, Hkv, S, D].
        value: [B, Hkv, S, D].
        mask: Bool [T, S], true where a row sees a key.

    Returns:
        [B, T, Hq * D].
    """
    batch, heads, rows, dim = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], groups * rows, dim)
    out = torch.nn.functional.scaled_dot_product_attention(folded, key, value, mask.repeat(groups, 1))
    return out.reshape(batch, heads, rows, dim).transpose(1, 2).reshape(batch, rows, heads * dim)


class UnrolledView(View):
    """All drafts that could begin in a text, side by side: pass k holds node k of the draft that begins at each row.

    ```
    pass 0   row t sees the rows 0 … t of pass 0                     (the text, read by the layer)
    pass 2   row t sees the rows 0 … t of pass 0, and row t of the passes 1 and 2         (its own draft)
    ```

    Rows behind the end of a shorter text are seen by none that count. With `own` every pass has a layer of its own,
    which reads the text up to row t - k, where all tokens are known, and the row itself.

    Source: the training-time test of Li et al. 2025, "EAGLE-3", section 3.2.

    Args:
        batch: B.
        length: T.
        device: Of the rows.
        own: Each pass has a layer of its own.
    """

    def __init__(self, batch: int, length: int, device: torch.device, *, own: bool = False) -> None:
        self.step, self.own = -1, own
        self._first = torch.arange(length, device=device).expand(batch, -1)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def next(self) -> "UnrolledView":
        """The view of the next pass."""
        self.step += 1
        self.positions = self._first + self.step
        if self.own:
            self._keys, self._values = [], []
        return self

    def seen(self) -> torch.Tensor:
        """See `View`; S is T, or without `own` (step + 1) * T."""
        rows = self._first[0]
        gap = rows[:, None] - rows[None, :]
        if self.own:
            return (gap >= self.step) | (gap == 0)
        return torch.cat([gap >= 0, *[gap == 0] * self.step], dim=1)

    def places(self) -> torch.Tensor:
        """See `View`."""
        return torch.cat([self._first[0] + step for step in range(self.step * self.own, self.step + 1)])

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `View`."""
        self._keys.append(key)
        self._values.append(value)
        return torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `View`. Of the passes after the first each row sees one key, which is no product of matrices."""
        self._keys.append(key)
        self._values.append(value)
        if len(self._keys) == 1:
            return attention(query, key, value, self.seen())
        batch, heads, rows, dim = query.shape
        folded = query.reshape(batch, key.shape[1], heads // key.shape[1], rows, dim) * dim**-0.5
        text, value_of_text = self._keys[0].unsqueeze(2), self._values[0].unsqueeze(2)
        hidden = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
        scores = [(folded @ text.transpose(-1, -2)).masked_fill(hidden, float("-inf"))]
        scores += [(folded * own.unsqueeze(2)).sum(-1, keepdim=True) for own in self._keys[1:]]
        weights = torch.cat(scores, dim=-1).softmax(-1)
        out = weights[..., :rows] @ value_of_text
        for place, own in enumerate(self._values[1:], start=rows):
            out = out + weights[..., place : place + 1] * own.unsqueeze(2)
        return out.reshape(batch, heads, rows, dim).transpose(1, 2).reshape(batch, rows, heads * dim)
