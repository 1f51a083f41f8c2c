"""Where the last tokens of a text stood before, in it and in other texts. Knows token ids and nothing else."""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from medusa_spec.errors import ConfigError

LONGEST_MATCH = 32
"""Tokens of a context that are compared; more of them say nothing new."""

LEAST_TOKENS = 4 * LONGEST_MATCH
"""Fewest tokens that an index may be asked to hold."""

LOOKED_AT = 16
"""Most places looked at for each of `ORDERS`, the most recent first."""

ORDERS = (4, 2)
"""Places are found by their last so many tokens; the larger number finds long matches among many short ones."""

BETWEEN = -1
"""Stands between texts, and is no token."""


class Place(NamedTuple):
    """Where a context stood before.

    Attributes:
        length: Tokens that are the same before it.
        tokens: What followed.
    """

    length: int
    tokens: Sequence[int]


class TextIndex:
    """Texts one behind the other, the oldest of which are forgotten: 20 bytes a token, at most.

    A token costs a microsecond to add, a look-up some tens where the context stood often.

    Args:
        limit: Most tokens held. Between half of them and all of them are, once there were so many.

    Raises:
        ConfigError: If the limit is too small to hold two contexts.
    """

    def __init__(self, limit: int) -> None:
        if limit < LEAST_TOKENS:
            raise ConfigError(f"limit must be {LEAST_TOKENS} tokens or more, got {limit}")
        self._room = limit // 2
        self._halves: tuple[_Half, ...] = (_Half(self._room),)

    def __len__(self) -> int:
        """Tokens held, marks between texts among them."""
        return sum(len(half.ids) for half in self._halves)

    def add(self, tokens: Sequence[int]) -> None:
        """Goes on with the text."""
        start = 0
        while start < len(tokens):
            half = self._halves[0]
            if len(half.ids) == self._room:
                half = _Half(self._room, half.ids[-LONGEST_MATCH:])
                self._halves = (half, self._halves[0])
            stop = start + self._room - len(half.ids)
            half.add(tokens[start:stop])
            start = stop

    def end_text(self) -> None:
        """What is added next is another text."""
        self.add((BETWEEN,))

    def find(self, context: Sequence[int], *, above: int = 1, depth: int = 24, running: bool = True) -> list[Place]:
        """Places where the end of the context stood, the most recent first.

        ```
        1 2 5 6 1 2 7 8 1 2          context … 1 2      places (2, [7 8 1 2 …]), (2, [5 6 1 2 …])
        ```

        A text that is running goes on as it went from the place to its end where fewer than `depth` tokens stand there:
        a loop goes on as a loop.

        Args:
            context: What is to be continued; its last `LONGEST_MATCH` tokens count.
            above: Only matches longer than that.
            depth: Most tokens that followed.
            running: Whether the last text has not ended.
        """
        found: list[Place] = []
        if above >= LONGEST_MATCH or not self._halves[0].ids:
            return found
        tail = array("i", context[-LONGEST_MATCH:])
        for half in self._halves:
            found += half.find(tail, above, depth, running=running and half is self._halves[0])
        return found


class _Half:
    """Tokens, and for each of `ORDERS` chains of the places behind equal runs of so many, found by their hash.

    A place is the number of tokens before it; 0 ends a chain.

    Args:
        room: Most tokens.
        context: Tokens of another half that come before; they are compared, but found there.
    """

    def __init__(self, room: int, context: Sequence[int] = ()) -> None:
        self.ids = array("i", context[:-1])
        self.mask = (1 << (room - 1).bit_length()) - 1
        self.newest = tuple(array("i", bytes(4 * (self.mask + 1))) for _ in ORDERS)
        self.earlier = tuple(array("i", bytes(4 * (1 + len(self.ids)))) for _ in ORDERS)
        self.add(context[-1:])  # what follows it follows here

    def add(self, tokens: Sequence[int]) -> None:
        ids, mask = self.ids, self.mask
        (four, two), (before_four, before_two) = self.newest, self.earlier
        a, b, c = (*[BETWEEN] * 3, *ids[-3:])[-3:]
        # Others may read meanwhile: what a chain leads to is there before the chain begins with it.
        for token in tokens:
            ids.append(token)
            place = len(ids)
            key = hash((a, b, c, token)) & mask
            before_four.append(four[key])
            four[key] = place
            key = hash((c, token)) & mask
            before_two.append(two[key])
            two[key] = place
            a, b, c = b, c, token

    def find(self, tail: "array[int]", above: int, depth: int, *, running: bool) -> list[Place]:
        """See `TextIndex`; the text of a running half has not ended."""
        found: list[Place] = []
        upper = LONGEST_MATCH + 1
        for order, newest, earlier in zip(ORDERS, self.newest, self.earlier, strict=True):
            if len(tail) >= order and upper > above + 1:
                first = newest[hash(tuple(tail[-order:])) & self.mask]
                lengths = range(max(order, above + 1), upper)
                for place, length in self._chain(first, earlier, tail) if first else ():
                    tokens = self._following(place, depth, running) if length in lengths else ()
                    if tokens:
                        found.append(Place(length, tokens))
                if any(place.length >= 2 * order for place in found):
                    break  # beside these, shorter ones say little
            upper = order
        return found

    def _chain(self, place: int, earlier: "array[int]", tail: "array[int]") -> Iterator[tuple[int, int]]:
        """Places along a chain, the most recent first, each with the number of tokens that match before it."""
        for _ in range(LOOKED_AT):
            if not place:
                return
            yield place, self._matched(tail, place)
            place = earlier[place]

    def _matched(self, tail: "array[int]", place: int) -> int:
        before = self.ids[max(0, place - len(tail)) : place]
        if before == tail:
            return len(tail)
        length = 0
        for one, other in zip(reversed(before), reversed(tail), strict=False):
            if one != other:
                break
            length += 1
        return length

    def _following(self, place: int, depth: int, running: bool) -> Sequence[int]:
        tokens = self.ids[place : place + depth]
        if BETWEEN in tokens:
            return tokens[: tokens.index(BETWEEN)]
        if running and tokens and len(tokens) < depth:
            return (tokens * (depth // len(tokens) + 1))[:depth]
        return tokens
