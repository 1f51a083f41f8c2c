"""A folder of segments: which of them count, and how they stay few. Knows no look-ups."""

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from medusa_spec.drafters.suffix_segment import Segment, write_segment
from medusa_spec.errors import CheckpointError
from medusa_spec.unfinished import locked, remove_unfinished

MOST_SEGMENTS = 8
"""Every one of them is searched."""

PARTS = 4
"""No segment is made that holds more than this part of the limit. Among nine that together stay below the limit two
neighbours always fit into one, and no more than a part is dropped at once."""

_NAME = re.compile(r"(\d{10})-(\d{10})\.safetensors")
_TRIES = 100


class SegmentFolder:
    """Segments in the order in which their texts came, named after the additions that they hold.

    ```
    0000000000-0000000005.safetensors     additions 0 to 5, merged
    0000000003-0000000003.safetensors     one of these, left by a kill: it does not count, and goes with the next
    0000000006-0000000006.safetensors     addition 6
    ```

    Args:
        path: The folder; it need not be there.

    Attributes:
        segments: Those that count, the oldest first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.segments: tuple[Segment, ...] = ()
        self._whole: dict[str, Segment] = {}
        self._names: frozenset[str] = frozenset()

    def refresh(self) -> None:
        """Takes in what was added, and leaves out what is gone or damaged, with a warning; lists the folder, no more,
        if nothing changed."""
        for _ in range(_TRIES):
            names = self._list()
            if names == self._names:
                return
            try:
                whole = {name: segment for name in sorted(names) if (segment := self._open(name))}
            except FileNotFoundError:  # it was merged since, so the list is another one now
                continue
            self.segments = tuple(segment for name, segment in whole.items() if not _merged(name, whole))
            self._whole, self._names = whole, names
            return

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Makes the folder, keeps other writers out, and removes what those that were killed have left."""
        self.path.mkdir(parents=True, exist_ok=True)
        with locked(self.path):
            remove_unfinished(self.path)
            self.refresh()
            self._remove([name for name in self._whole if _merged(name, self._whole)])
            yield

    def add(self, ids: torch.Tensor, notes: dict[str, str]) -> None:
        """Writes a segment behind all others; see `write_segment`. Only while writing."""
        number = 1 + max((_span(name)[1] for name in self._names), default=-1)
        self._write(number, number, ids, notes)

    def tidy(self, limit: int, notes: dict[str, str]) -> None:
        """Drops the oldest beyond the limit, then merges where there are too many. Only while writing."""
        while len(self.segments) > 1 and sum(map(len, self.segments)) > limit:
            self._remove([self.segments[0].path.name])
        while len(self.segments) > MOST_SEGMENTS and (pair := self._smallest_pair(limit // PARTS)):
            one, other = pair
            first, last = _span(one.path.name)[0], _span(other.path.name)[1]
            self._write(first, last, torch.cat([one.ids, other.ids]), notes)
            self._remove([one.path.name, other.path.name])

    def _smallest_pair(self, room: int) -> tuple[Segment, Segment] | None:
        """Neighbours to merge; between those that are none lies a damaged one, which is not for us to remove."""
        pairs = [
            (one, other)
            for one, other in zip(self.segments, self.segments[1:], strict=False)
            if _span(one.path.name)[1] + 1 == _span(other.path.name)[0] and len(one) + len(other) <= room
        ]
        return min(pairs, key=lambda pair: len(pair[0]) + len(pair[1]), default=None)

    def _write(self, first: int, last: int, ids: torch.Tensor, notes: dict[str, str]) -> None:
        write_segment(self.path / f"{first:010d}-{last:010d}.safetensors", ids, notes)
        self.refresh()

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)
        self.refresh()

    def _list(self) -> frozenset[str]:
        try:
            return frozenset(name for name in os.listdir(self.path) if _NAME.fullmatch(name))
        except FileNotFoundError:
            return frozenset()

    def _open(self, name: str) -> Segment | None:
        known = self._whole.get(name)
        if known is not None or name in self._names:  # a name never comes back with other texts
            return known
        try:
            return Segment(self.path / name)
        except CheckpointError as error:
            warnings.warn(f"{error}; it is left out", stacklevel=2)
            return None


def _span(name: str) -> tuple[int, int]:
    """Number of the first and of the last addition in a segment of this name."""
    found = _NAME.fullmatch(name)
    assert found is not None
    return int(found[1]), int(found[2])


def _merged(name: str, names: Sequence[str] | dict[str, Segment]) -> bool:
    """Whether another one holds all of it."""
    first, last = _span(name)
    return any(begin <= first and last <= end for other in names if other != name for begin, end in (_span(other),))
