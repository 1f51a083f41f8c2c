"""What proposes a tree. Knows committed tokens and h, never the target's choices ahead of time."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from medusa_spec.tree import TokenTree


class DraftSession(ABC):
    """A drafter's state for one request; never shared between threads."""

    @abstractmethod
    def draft(self, root: int, h: torch.Tensor | None, limit: int | None) -> TokenTree:
        """Proposes a tree.

        Args:
            root: The token that the target has just chosen; it is the tree's root.
            h: [H], the target's hidden state from which it chose the root; None if the drafter does not need it.
            limit: Most draft nodes wanted; None leaves it to the drafter.

        Returns:
            A tree of at most `limit` draft nodes; a lone root means plain decoding for this pass.
        """

    def observe(self, tokens: Sequence[int]) -> None:  # noqa: B027 (most drafters need not override it)
        """Is told the tokens emitted by the last pass, before the next `draft`; the last of them will be its root."""


class Drafter(ABC):
    """Anything that proposes trees: heads, n-gram lookup, the user's own.

    Attributes:
        name: As printed.
        needs_hidden: Whether sessions read h.
    """

    name: str
    needs_hidden: bool = False

    @abstractmethod
    def begin(self, prompt: Sequence[int]) -> DraftSession:
        """A session for a request with these prompt ids (padding removed)."""
