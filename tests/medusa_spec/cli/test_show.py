import inspect
import io
from collections.abc import Sequence
from types import FunctionType as Function
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.cli.show import (
    BRACKETS,
    GREEN_UNDERLINED,
    IncrementalText,
    MarkedStreamer,
    WatchedDrafter,
    accepted_marks,
)
from medusa_spec.drafters import Drafter, DraftSession, NgramDrafter, ReadStates
from medusa_spec.drafters.asking import alone, answered
from medusa_spec.testing import tiny_tokenizer
from medusa_spec.tree import TokenTree, TreeShape, chain

TOKENIZER = tiny_tokenizer()


def _ids(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def _streamer(**options: object) -> tuple[MarkedStreamer, io.StringIO]:
    out = io.StringIO()
    streamer = MarkedStreamer(TOKENIZER, out=out, **options)  # type: ignore[arg-type]
    streamer.put(torch.tensor([_ids("the prompt")]))
    return streamer, out


def _put(streamer: MarkedStreamer, text: str) -> None:
    for token in _ids(text):
        streamer.put(torch.tensor([token]))


@given(st.text(max_size=30))
def test_increments_join_to_the_whole_text(text: str) -> None:
    incremental = IncrementalText(TOKENIZER)
    ids = _ids(text)
    joined = "".join(incremental.add(token) for token in ids) + incremental.rest()
    assert joined == TOKENIZER.decode(ids, skip_special_tokens=True)


def test_half_a_character_is_held_back() -> None:
    incremental = IncrementalText(TOKENIZER)
    first, *others, last = _ids("你")
    assert [incremental.add(token) for token in (first, *others)] == [""] * (1 + len(others))
    assert incremental.add(last) == "你"


def test_what_never_became_a_character_is_shown_at_the_end() -> None:
    incremental = IncrementalText(TOKENIZER)
    incremental.add(_ids("你")[0])
    assert incremental.rest() == "\ufffd"


def test_prompt_and_special_tokens_are_not_shown() -> None:
    streamer, out = _streamer()
    _put(streamer, "yes<|im_end|>")
    streamer.end()
    assert out.getvalue() == "yes\n"


def test_exactly_the_accepted_draft_tokens_are_marked() -> None:
    streamer, out = _streamer(marks=BRACKETS)
    _put(streamer, "a")
    # The draft after "a" is "bcd" or "x"; the model says "bc", then "e" of its own.
    shape = TreeShape(parents=(-1, 0, 1, 2, 0))
    streamer.drafted(TokenTree(shape=shape, tokens=tuple(_ids("abcdx"))))
    _put(streamer, "bce")
    streamer.drafted(TokenTree(shape=chain(1), tokens=tuple(_ids("ex"))))
    _put(streamer, "b")
    streamer.drafted(TokenTree(shape=chain(1), tokens=tuple(_ids("bf"))))
    _put(streamer, "f")
    streamer.end()
    assert out.getvalue() == "a‹bc›eb‹f›\n"
    assert streamer.accepted == 3


def test_a_token_like_a_guess_at_another_depth_is_not_marked() -> None:
    streamer, out = _streamer(marks=BRACKETS)
    streamer.drafted(TokenTree(shape=chain(2), tokens=tuple(_ids("abc"))))
    _put(streamer, "cb")
    streamer.end()
    assert out.getvalue() == "cb\n"


def test_without_marks_the_text_is_bare() -> None:
    streamer, out = _streamer()
    streamer.drafted(TokenTree(shape=chain(1), tokens=tuple(_ids("ab"))))
    _put(streamer, "b")
    streamer.end()
    assert out.getvalue() == "b\n"


def test_every_line_is_indented() -> None:
    streamer, out = _streamer(indent="  ")
    _put(streamer, "one\ntwo")
    streamer.end()
    assert out.getvalue() == "  one\n  two\n"


def test_watched_drafter_drafts_as_the_other_does_and_shows_each_tree() -> None:
    seen: list[TokenTree] = []
    prompt = [1, 2, 3, 4, 1, 2]
    watched = WatchedDrafter(NgramDrafter(), seen.append).begin(prompt)
    bare = NgramDrafter().begin(prompt)
    for root in (3, 4, 1):
        tree = watched.draft(root, None, None)
        assert tree == bare.draft(root, None, None) == seen[-1]
        for session in (watched, bare):
            session.observe([root + 1])
    assert any(tree.size > 1 for tree in seen)


def test_marks_are_colours_on_a_terminal_and_brackets_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert accepted_marks(Terminal())[0] == GREEN_UNDERLINED
    assert accepted_marks(io.StringIO()) == BRACKETS
    monkeypatch.setenv("NO_COLOR", "1")
    assert accepted_marks(Terminal()) == BRACKETS


def test_a_watched_drafter_is_shown_what_the_other_asks_for() -> None:
    told: list[object] = []

    class Reading(DraftSession):
        def draft(self, root: int, h: torch.Tensor | None, limit: int | None) -> TokenTree:
            return TokenTree.root_only(root)

        def read(self, ids: Sequence[int], states: ReadStates) -> None:
            told.append((list(ids), states))

        def forget(self) -> None:
            told.append("forget")

    class Reader(Drafter):
        name, reads = "reader", (1, 3)

        def begin(self, prompt: Sequence[int]) -> DraftSession:
            return Reading()

    watched = WatchedDrafter(Reader(), lambda tree: None)
    session, states = watched.begin([]), ReadStates(h=torch.ones(2, 4))
    session.read([5, 6], states)
    session.forget()
    assert watched.reads == (1, 3) and told == [([5, 6], states), "forget"]


GENERATORS = ("drafting", "proposing")


def test_a_watched_drafter_hands_on_all_that_a_drafter_can_be_asked() -> None:
    """What is added to the base classes, too: the base class's own answer would hide the other's."""
    asked: list[str] = []

    def noting(kind: type) -> Any:
        """An object of the kind that notes what it is asked."""

        def member(name: str) -> Any:
            def note(self: Any, *arguments: Any) -> Any:
                asked.append(name)
                return answered(None) if name in GENERATORS else None

            return property(note) if isinstance(vars(kind)[name], property) else note

        return type("Noting", (kind,), {name: member(name) for name in public(kind)})()

    def ask(one: Any, kind: type, name: str) -> None:
        value = vars(kind)[name]
        if isinstance(value, property):
            getattr(one, name)
        else:
            answer = getattr(one, name)(*[None] * (len(inspect.signature(value).parameters) - 1))
            if name in GENERATORS:
                alone(answer)

    session, other = noting(DraftSession), noting(Drafter)
    watched = WatchedDrafter(NgramDrafter(), lambda tree: None)
    watched._drafter = other
    for name in public(Drafter):
        ask(watched, Drafter, name)
        assert asked.pop() == name
    other.__class__.begin = lambda self, prompt: session
    own = watched.begin([])
    for name in set(public(DraftSession)) - {"fixed"}:
        session.levels += 1
        ask(own, DraftSession, name)
        assert asked.pop() == name
        if "draft" in name or name == "propose":
            assert own.levels == session.levels
    assert own.fixed(torch.ones(4), None) is None and asked == []
    # A new attribute is to be handed on, and named here.
    assert set(Drafter.__annotations__) == {"name", "reads"} and set(DraftSession.__annotations__) == {"levels"}


def public(kind: type) -> list[str]:
    """Methods and properties of a class."""
    members = vars(kind).items()
    return [name for name, value in members if not name.startswith("_") and isinstance(value, Function | property)]


def test_trees_that_cost_nothing_are_shown_too() -> None:
    seen: list[TokenTree] = []

    class Free(NgramDrafter):
        def begin(self, prompt: Sequence[int]) -> DraftSession:
            session = super().begin(prompt)
            session.draft_free = lambda root, limit: session.draft(root, None, limit)  # type: ignore[method-assign]
            return session

    tree = WatchedDrafter(Free(), seen.append).begin([1, 2, 3, 1, 2]).draft_free(2, None)
    assert tree.size > 1 and seen == [tree]
