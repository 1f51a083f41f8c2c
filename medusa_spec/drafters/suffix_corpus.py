"""Texts in a folder, for look-up by every process that reads it, now and later. Knows ids, no tokenizer."""

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from medusa_spec.drafters.suffix_folder import PARTS, SegmentFolder
from medusa_spec.drafters.suffix_segment import LEAST_MATCH, Segment
from medusa_spec.drafters.text_index import BETWEEN, LONGEST_MATCH, Place
from medusa_spec.errors import ConfigError

DEFAULT_LIMIT = 1 << 24
"""Most tokens where nobody says otherwise: 128 MiB."""

LEAST_LIMIT = 16 * LONGEST_MATCH
"""Fewest tokens that a corpus may be asked to hold."""

PLACES = 8
"""Most places that a look-up gives."""

_HIGHEST_ID = (1 << 31) - 2


class SuffixCorpus:
    """A folder of texts in which the longest end of a context is looked up.

    Any number of processes may read while one adds; others that add wait for it. A kill loses what is being added and
    nothing else. On the disk and, once look-ups have touched all of it, in memory a token takes 8 bytes; adding takes
    more for as long as it lasts (see `docs/drafters.md`).

    Args:
        folder: The folder; it need not be there yet.
        limit: Most tokens held from the next `add` on, marks between texts among them. The oldest are dropped, a
            quarter of the limit at once. None for what was said last, else `DEFAULT_LIMIT`.
        identity: Says whose ids they are; `vocabulary_identity` names a tokenizer. None to read whatever is there.

    Raises:
        ConfigError: If the limit is out of range, or the folder holds ids of another identity.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int | None = None, identity: str | None = None) -> None:
        if limit is not None and not LEAST_LIMIT <= limit < 1 << 31:
            raise ConfigError(f"limit must be in {LEAST_LIMIT}..{(1 << 31) - 1} tokens, got {limit}")
        self.folder, self.identity = Path(folder), identity
        self._limit, self._files = limit, SegmentFolder(self.folder)
        self.refresh()

    def __reduce__(self) -> Any:
        return SuffixCorpus, (self.folder, self._limit, self.identity)  # files stay where they are

    def __len__(self) -> int:
        """Tokens held, marks between texts among them."""
        return sum(map(len, self.segments))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The files, the oldest texts first."""
        return self._files.segments

    @property
    def limit(self) -> int:
        """Most tokens held from the next `add` on."""
        if self._limit is not None:
            return self._limit
        return int(self.segments[-1].notes["limit"]) if self.segments else DEFAULT_LIMIT

    def refresh(self) -> None:
        """Takes in what others have added; where nothing was, the folder is listed and no more.

        Raises:
            ConfigError: If it holds ids of another identity.
        """
        self._files.refresh()
        if self.identity is not None:
            self._check_identity("take another folder, or the tokenizer that they are of")

    def add(self, texts: Iterable[Sequence[int]]) -> None:
        """Adds texts; they are on the disk when it returns.

        Args:
            texts: The ids of each. What is too short to be found (`LEAST_MATCH` tokens and one behind) is left out.

        Raises:
            ConfigError: If an id is none, or the folder holds ids of another identity.
        """
        for ids in _parts(texts, self.limit // PARTS):
            with self._files.writing():
                self._check_identity("texts of one tokenizer alone can be added to them")
                notes = {"limit": str(self.limit)} | ({} if self.identity is None else {"identity": self.identity})
                self._files.add(ids, notes)
                self._files.tidy(self.limit, notes)

    def find(self, context: Sequence[int], *, above: int = 0, depth: int = 24) -> list[Place]:
        """Places where the longest end of the context stood, the most recent first in each file.

        Args:
            context: What is to be continued; its last `LONGEST_MATCH` tokens count.
            above: Only a match longer than that, and of `LEAST_MATCH` tokens.
            depth: Most tokens that followed.

        Returns:
            At most `PLACES` with one and the same length, evenly spread over all that there are.
        """
        wanted = list(context[-LONGEST_MATCH:])[::-1]
        above = max(above, LEAST_MATCH - 1)
        if len(wanted) <= above:
            return []
        segments = self.segments[::-1]
        lengths = [segment.longest(wanted) for segment in segments]
        longest = max(lengths, default=0)
        if longest <= above:
            return []
        spans = [
            (segment, segment.span(wanted[:longest]))
            for segment, length in zip(segments, lengths, strict=True)
            if length == longest
        ]
        return [Place(longest, segment.following(place, depth)) for segment, place in _spread(spans)]

    def _check_identity(self, advice: str) -> None:
        for segment in self.segments:
            found = segment.notes.get("identity")
            if found != self.identity:
                raise ConfigError(
                    f"{self.folder} holds ids of {_named(found)}, not of {_named(self.identity)}; {advice}"
                )


def _named(identity: str | None) -> str:
    return "a tokenizer without a name" if identity is None else f"the tokenizer {identity!r}"


def _spread(spans: Sequence[tuple[Segment, range]]) -> list[tuple[Segment, int]]:
    """Places evenly spread over those of all spans."""
    total = sum(len(span) for _, span in spans)
    chosen = [number * total // PLACES for number in range(PLACES)] if total > PLACES else list(range(total))
    found: list[tuple[Segment, int]] = []
    start = 0
    for segment, span in spans:
        places = [segment.place(span[number - start]) for number in chosen if start <= number < start + len(span)]
        found += [(segment, place) for place in sorted(places, reverse=True)]
        start += len(span)
    return found


def _parts(texts: Iterable[Sequence[int]], room: int) -> Iterator[torch.Tensor]:
    """Texts one behind the other, `BETWEEN` behind each, in parts of no more than so many tokens."""
    part = array("i")
    for text in texts:
        for piece in _pieces(_checked(text), room - 1):
            if len(part) + len(piece) >= room:
                yield torch.frombuffer(part, dtype=torch.int32)
                part = array("i")
            part.extend(piece)
            part.append(BETWEEN)
    if part:
        yield torch.frombuffer(part, dtype=torch.int32)


def _pieces(ids: "array[int]", size: int) -> "Iterator[array[int]]":
    """A text, or pieces of one that is too long: each begins with the context that the next token needs."""
    start = 0
    while len(ids) - start > LEAST_MATCH:
        yield ids[start : start + size]
        if start + size >= len(ids):
            return
        start += size - LONGEST_MATCH


def _checked(text: Sequence[int]) -> "array[int]":
    try:
        ids = array("i", text)
    except (OverflowError, TypeError) as error:
        raise ConfigError(f"texts must hold token ids, got {text!r:.80}: {error}") from error
    if ids and not (min(ids) >= 0 and max(ids) <= _HIGHEST_ID):
        raise ConfigError(f"texts must hold ids in 0..{_HIGHEST_ID}, got {min(ids)} to {max(ids)}")
    return ids
