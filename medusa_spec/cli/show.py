"""Text on the terminal while it is decoded, accepted draft tokens marked. Knows no model."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from medusa_spec.drafters import Drafter, DraftSession, ReadStates
from medusa_spec.drafters.asking import Drafting
from medusa_spec.tree import Candidates, Prices, TokenTree

GREEN_UNDERLINED, RESET = "\x1b[32;4m", "\x1b[0m"
BRACKETS = "‹", "›"


class IncrementalText:
    """Tokens in, text out, holding back what a later token may still change.

    A token is decoded together with those of the last output, since tokenizers drop the space of a
    first word and split characters over tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._before = 0
        self._shown = 0

    def add(self, token: int) -> str:
        """The text that this token settles."""
        self._tokens.append(token)
        text = self._pending()
        if text.endswith("\ufffd"):
            return ""
        self._before, self._shown = self._shown, len(self._tokens)
        return text

    def rest(self) -> str:
        """What is still held back."""
        text = self._pending()
        self._before = self._shown = len(self._tokens)
        return text

    def _pending(self) -> str:
        known = self._decode(self._tokens[self._before : self._shown])
        return self._decode(self._tokens[self._before :])[len(known) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


class MarkedStreamer(BaseStreamer):
    """Writes text as it comes, the accepted draft tokens in colour or in brackets.

    A token is an accepted draft if it is a child, in the tree last drafted, of the token before.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        out: TextIO | None = None,
        marks: tuple[str, str] | None = None,
        indent: str = "",
    ) -> None:
        self._text = IncrementalText(tokenizer)
        self._out = sys.stdout if out is None else out
        self._marks = marks
        self._indent = indent
        self._prompt_seen = False
        self._marked = False
        self._line_open = False
        self._tree: TokenTree | None = None
        self._node: int | None = None
        self.accepted = 0

    def drafted(self, tree: TokenTree) -> None:
        """Is told each pass's tree before the pass; see `WatchedDrafter`."""
        self._tree, self._node = tree, 0

    def put(self, value: torch.Tensor) -> None:
        """The prompt first (not shown), then tokens [T] or [1, T]."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for token in value.reshape(-1).tolist():
            accepted = self._is_accepted(token)
            self.accepted += accepted
            self._write(self._text.add(token), marked=accepted)
        self._out.flush()

    def end(self) -> None:
        """Write what was held back, and end the line."""
        self._write(self._text.rest(), marked=False)
        self._switch(False)
        self._out.write("\n")
        self._out.flush()

    def _is_accepted(self, token: int) -> bool:
        if self._tree is not None and self._node is not None:
            self._node = self._tree.child_with(self._node, token)
        return self._node is not None

    def _write(self, text: str, *, marked: bool) -> None:
        if not text:
            return
        if not self._line_open:
            self._out.write(self._indent)
            self._line_open = True
        self._switch(marked)
        self._out.write(text.replace("\n", "\n" + self._indent))

    def _switch(self, marked: bool) -> None:
        if self._marks is not None and marked != self._marked:
            self._out.write(self._marks[0] if marked else self._marks[1])
        self._marked = marked


class WatchedDrafter(Drafter):
    """Another drafter that shows its trees to somebody before they are verified."""

    def __init__(self, drafter: Drafter, drafted: Callable[[TokenTree], None]) -> None:
        self.name, self.reads = drafter.name, drafter.reads
        self._drafter = drafter
        self._drafted = drafted

    @property
    def level_share(self) -> float:
        """See `Drafter`."""
        return self._drafter.level_share

    @property
    def hit(self) -> float | None:
        """See `Drafter`."""
        return self._drafter.hit

    def expected(self) -> Sequence[float] | None:
        """See `Drafter`."""
        return self._drafter.expected()

    def begin(self, prompt: Sequence[int]) -> DraftSession:
        """A session of the other drafter, watched."""
        return _WatchedSession(self._drafter.begin(prompt), self._drafted)


class _WatchedSession(DraftSession):
    """All of another session but `fixed`: trees that the host never reads could be shown to nobody."""

    def __init__(self, session: DraftSession, drafted: Callable[[TokenTree], None]) -> None:
        self._session = session
        self._drafted = drafted

    def draft(self, root: int, h: torch.Tensor | None, limit: int | None) -> TokenTree:
        return self._shown(self._session.draft(root, h, limit))

    def drafting(self, root: int, h: torch.Tensor | None, limit: int | None) -> Drafting[TokenTree]:
        return self._shown((yield from self._session.drafting(root, h, limit)))

    def draft_free(self, root: int, limit: int | None) -> TokenTree:
        return self._shown(self._session.draft_free(root, limit))

    def _shown(self, tree: TokenTree) -> TokenTree:
        self.levels = self._session.levels
        self._drafted(tree)
        return tree

    @property
    def bytes_per_token(self) -> int:
        return self._session.bytes_per_token

    def propose(self, root: int, h: torch.Tensor | None, candidates: Candidates) -> bool:
        proposed = self._session.propose(root, h, candidates)
        self.levels = self._session.levels
        return proposed

    def proposing(self, root: int, h: torch.Tensor | None, candidates: Candidates) -> Drafting[bool]:
        proposed = yield from self._session.proposing(root, h, candidates)
        self.levels = self._session.levels
        return proposed

    def price(self, prices: Prices) -> None:
        self._session.price(prices)

    def observe(self, tokens: Sequence[int]) -> None:
        self._session.observe(tokens)

    def read(self, ids: Sequence[int], states: ReadStates) -> None:
        self._session.read(ids, states)

    def forget(self) -> None:
        self._session.forget()


def accepted_marks(out: TextIO) -> tuple[str, str]:
    """Colour with a line under it where the terminal has colours, else brackets."""
    return (GREEN_UNDERLINED, RESET) if _has_colour(out) else BRACKETS


def explain_marks(marks: tuple[str, str]) -> str:
    """The sentence that says what the marks mean."""
    return f"{marks[0]}like this{marks[1]}: drafted, and accepted by the model"


def _has_colour(out: Any) -> bool:
    # https://no-color.org
    return bool(out.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
