"""Texts of requests that have ended, in the memory of this process. Knows when a session ends, not what it drafts."""

import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from threading import Lock

from medusa_spec.drafters.text_index import LONGEST_MATCH, Place, TextIndex

_ADDING = Lock()
"""Of all drafters together, so that none has a lock of its own and all can be copied and pickled."""


class EarlierTexts:
    """An index over what earlier sessions of a drafter have read and written.

    Args:
        limit: Most tokens held; 0 for none.
    """

    def __init__(self, limit: int) -> None:
        self.index = TextIndex(limit) if limit else None
        self._ended: deque[array[int]] = deque()
        self._last: Sequence[int] = array("i")

    def watch(self, session: object, text: "array[int]") -> None:
        """Takes the text over when the session is gone."""
        if self.index is not None:
            weakref.finalize(session, self._ended.append, text).atexit = False

    def take_over(self) -> None:
        """Adds the texts of sessions that are gone, without what they have in common with the one before."""
        if self.index is None or not self._ended:
            return
        with _ADDING:
            while self._ended:
                text = self._ended.popleft()
                common = _common(self._last, text)
                if common == len(self._last):  # a conversation's next turn begins with all of the one before
                    self.index.add(text[common:])
                elif common < len(text):
                    self.index.end_text()
                    self.index.add(text[max(0, common - LONGEST_MATCH) :])
                else:
                    continue
                self._last = text

    def find(self, context: Sequence[int], *, above: int, depth: int) -> list[Place]:
        """See `TextIndex`."""
        return [] if self.index is None else self.index.find(context, above=above, depth=depth, running=False)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two texts have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))
