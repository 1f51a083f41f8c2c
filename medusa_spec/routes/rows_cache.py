"""A cache for routes that copy the model's own state: the text's state, and what the last tree made of it."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from medusa_spec.errors import UnsupportedError
from medusa_spec.routes.text_state import TextState

if TYPE_CHECKING:
    from medusa_spec.backbone import Backbone

Settle = Callable[[Sequence[int]], TextState]
"""From an accepted path to the state behind it."""


class RowsCache:
    """States of several texts, with what `SlabCache` offers to the loop.

    A tree pass leaves the states alone; `keep` then puts the one behind the accepted path in place.

    Args:
        backbone: The target.
        batch: Texts.

    Attributes:
        lengths: Tokens read of each text.
        states: State of each text.
        settle: How the last tree pass of each text ends; None before the first.
    """

    def __init__(self, backbone: "Backbone", batch: int = 1) -> None:
        self.backbone = backbone
        self.states = [TextState(backbone) for _ in range(batch)]
        self.settle: list[Settle | None] = [None] * batch

    @property
    def lengths(self) -> list[int]:
        """Tokens read of each text."""
        return [state.ids.shape[1] for state in self.states]

    def get_seq_length(self) -> int:
        """Tokens read of the longest text."""
        return max(self.lengths)

    def seal(self, reserve: int, unread: int = 0) -> None:
        """Nothing to do: states grow by themselves."""

    def make_room(self, nodes: int | Sequence[int]) -> None:
        """Nothing to do: a tree pass works on copies."""

    def keep(self, row: int, path: Sequence[int]) -> None:
        """Makes the nodes of `path` (root first), of the last tree pass, part of a text."""
        settle = self.settle[row]
        assert settle is not None, "keep before a tree pass"
        self.states[row], self.settle[row] = settle(path), None

    def bytes_held(self) -> tuple[int, int]:
        """Bytes of the first text's state that do not grow with it, and those that each token adds."""
        state, held = self.states[0].rows([0]), []
        for _ in range(2):
            state.read(state.ids.new_zeros(1, 1))
            held.append(state.bytes_held)
        return held[0] - state.ids.shape[1] * (held[1] - held[0]) + (held[1] - held[0]), held[1] - held[0]

    @classmethod
    def joined(cls, caches: "Sequence[RowsCache]", config: Any, reserve: int) -> "RowsCache":
        """One cache of several texts, copies of the first of each of these; the same one may stand for several."""
        whole = cls(caches[0].backbone, len(caches))
        whole.states = [cache.states[0].rows([0]) for cache in caches]
        return whole

    # --- rows that come and go ----------------------------------------------------------------------------------------

    def empty(self, row: int) -> None:
        """Forgets a text, in whose place another one may be read."""
        self.states[row], self.settle[row] = TextState(self.backbone), None

    @contextmanager
    def only(self, row: int) -> Iterator["RowsCache"]:
        """Within it, one text as a cache of its own."""
        view = copy.copy(self)
        view.states, view.settle = self.states[row : row + 1], [None]
        yield view
        self.states[row] = view.states[0]

    # --- exchange with Hugging Face's caches --------------------------------------------------------------------------

    def load(self, cache: Any) -> None:
        """Takes over a copy of a user's cache, before anything was read.

        Raises:
            UnsupportedError: If it is of another class than the model's own, or does not say how much it has read.
        """
        own = self.states[0].kwargs.get(self.backbone.cache_argument)
        if own is None or type(cache) is not type(own):
            kind = "no cache: this model keeps its state elsewhere" if own is None else f"a {type(own).__name__}"
            raise UnsupportedError(f"cache must be {kind}, got {type(cache).__name__}; pass the whole text without one")
        layers = getattr(cache, "is_linear", ())
        if layers and all(layers):
            if cache.has_previous_state():
                raise UnsupportedError(
                    f"the cache of a {type(self.backbone.model).__name__} does not say how many tokens it has read, so "
                    "decoding cannot go on behind it; pass the whole text and no cache"
                )
        elif cache.get_seq_length() > 0:
            self.states[0].adopt(cache, cache.get_seq_length())

    def export(self, config: Any, into: Any = None, padding: int = 0) -> Any:
        """The model's own cache of the first text, as `generate` returns it; `into`, the user's, gets its layers.

        Of a padded prompt there is none: plain decoding would have the padding in it.

        Raises:
            UnsupportedError: If the user's is to be brought up to date behind padding.
        """
        if padding and into is not None:
            raise UnsupportedError("a cache with a padded prompt cannot be speculated; pass the prompt unpadded")
        if padding:
            return None
        cache = self.states[0].rows([0]).kwargs.get(self.backbone.cache_argument)
        if into is None or cache is None:
            return cache
        into.layers = cache.layers
        return into
