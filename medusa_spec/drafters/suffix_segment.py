"""Texts in one file that never changes, and the order in which their places are found. Knows no folder."""

import json
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from medusa_spec.drafters.text_index import BETWEEN, LONGEST_MATCH
from medusa_spec.errors import CheckpointError
from medusa_spec.files import write_tensors

LEAST_MATCH = 4
"""Fewest tokens of a context that must be the same: in many texts fewer of them stand everywhere."""

FORMAT = "suffix-segment 1"
_IDS, _ORDER, _SUM = "ids", "order", "crc32"
_PIECE = 1 << 20


def suffix_order(ids: torch.Tensor) -> torch.Tensor:
    """Places by what stands before them, read backwards, `LONGEST_MATCH` tokens at most; of equals the first first.

    ```
    ids  5 6 7 5 6 8 -1      place 2: 6 5 before it; place 5: 6 5 7      order … 2 5 …
    ```

    A place is the number of tokens before it. Those with fewer than `LEAST_MATCH` tokens of their own text before them,
    or none behind, are left out. Ranks of one token make those of two, these those of four: five sorts.

    Args:
        ids: Int32 [T], `BETWEEN` behind every text.

    Returns:
        Int32 [places].
    """
    rank = torch.cat([ids.new_zeros(1), ids + 1]).long()  # of the token before each place; 0 where there is none
    reach = 1
    while reach < LONGEST_MATCH:
        before = torch.cat([rank.new_zeros(reach), rank[:-reach]])[: len(rank)]
        pairs = rank.mul_(int(rank.max()) + 1).add_(before)
        rank = torch.unique(pairs, return_inverse=True)[1]
        reach *= 2
    order = rank.argsort(stable=True)
    return order[_useful(ids)[order]].int()


def _useful(ids: torch.Tensor) -> torch.Tensor:
    """Bool [T + 1]: places with enough tokens of their text before them and one behind."""
    token = ids != BETWEEN
    useful = torch.cat([token, token.new_zeros(1)])
    for back in range(1, LEAST_MATCH + 1):
        useful[back:] &= token[: len(useful) - back]
        useful[:back] = False
    return useful


def write_segment(path: Path, ids: torch.Tensor, notes: Mapping[str, str]) -> None:
    """Writes texts and their order; the file is whole or not there.

    Args:
        path: The file.
        ids: As for `suffix_order`.
        notes: Kept beside them.
    """
    tensors = {_IDS: ids, _ORDER: suffix_order(ids)}
    checks = {name: zlib.crc32(tensor.numpy().data) for name, tensor in tensors.items()}
    write_tensors(path, tensors, {**notes, "format": FORMAT, _SUM: json.dumps(checks)})


class Segment:
    """A file of texts, mapped into memory: what look-ups do not touch stays on the disk.

    Args:
        path: The file. It is read once to be sure that it is whole.

    Attributes:
        ids: Int32 [T], `BETWEEN` behind every text.
        notes: What was kept beside them.

    Raises:
        FileNotFoundError: If it is not there.
        CheckpointError: If it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, framework="pt") as file:
                self.notes: dict[str, str] = dict(file.metadata() or {})
                if self.notes.get("format") != FORMAT:
                    raise ValueError(f"its format must be {FORMAT!r}, got {self.notes.get('format')!r}")
                _check(path, json.loads(self.notes[_SUM]))
                self.ids, order = file.get_tensor(_IDS), file.get_tensor(_ORDER)
        except FileNotFoundError:
            raise
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); delete it, and add its texts again") from error
        # Python reads single numbers of a memoryview several times faster than of a tensor.
        self._ids, self._order = self.ids.numpy().data, order.numpy().data

    def __len__(self) -> int:
        """Tokens held, marks between texts among them."""
        return len(self._ids)

    def longest(self, wanted: list[int]) -> int:
        """Most tokens that are the same before any place.

        Args:
            wanted: The end of a context read backwards, `LONGEST_MATCH` tokens at most.
        """
        here = bisect_left(self._order, wanted, key=self._before)
        nearest = self._order[max(0, here - 1) : here + 1]
        return max((_common(self._before(place), wanted) for place in nearest), default=0)

    def span(self, wanted: list[int]) -> range:
        """Numbers, in the order, of the places that have all of these before them."""

        def before(place: int) -> list[int]:
            return self._before(place, len(wanted))

        low = bisect_left(self._order, wanted, key=before)
        return range(low, bisect_right(self._order, wanted, low, key=before))

    def place(self, number: int) -> int:
        """The place with this number in the order."""
        return self._order[number]

    def following(self, place: int, depth: int) -> Sequence[int]:
        """What stands behind a place, to the end of its text."""
        tokens = array("i", self._ids[place : place + depth])
        return tokens[: tokens.index(BETWEEN)] if BETWEEN in tokens else tokens

    def _before(self, place: int, length: int = LONGEST_MATCH) -> list[int]:
        tokens = self._ids[max(0, place - length) : place].tolist()
        tokens.reverse()
        return tokens


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def _check(path: Path, expected: Mapping[str, int]) -> None:
    """Compares checksums, through the file: reading the map would make all of it resident.

    Raises:
        ValueError: If one differs.
    """
    with open(path, "rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        places = json.loads(file.read(start - 8))
        for name in (_IDS, _ORDER):
            begin, end = places[name]["data_offsets"]
            file.seek(start + begin)
            found, left = 0, end - begin
            while left > 0 and (piece := file.read(min(left, _PIECE))):
                found, left = zlib.crc32(piece, found), left - len(piece)
            if found != expected[name]:
                raise ValueError(f"the checksum of {name!r} must be {expected[name]}, got {found}")
