"""What followed before is proposed as far as it pays, from this text and from those of earlier sessions."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from medusa_spec.drafters import DraftSession, SuffixCorpus, SuffixDrafter
from medusa_spec.drafters.evidence import Support
from medusa_spec.drafters.suffix import USUAL_PRICES
from medusa_spec.errors import ConfigError
from medusa_spec.tree import Candidates, Prices, TokenTree

COSTLY = Prices(token_seconds=1.0, level_seconds=0.0, pass_seconds=((1, 1.0), (9, 8.0)))
FREE = Prices(token_seconds=1.0, level_seconds=0.0, pass_seconds=((1, 1.0), (13, 1.0)))


def draft(ids: list[int], *, limit: int | None = None, **settings: Any) -> TokenTree:
    """The draft behind `ids`, the last of which is the root."""
    return SuffixDrafter(**settings).begin(ids).draft(ids[-1], None, limit)


def chains(tree: TokenTree) -> list[list[int]]:
    """The draft's paths as tokens, the root left out."""
    return [[tree.tokens[node] for node in tree.shape.path_to(leaf)[1:]] for leaf in tree.shape.leaves()]


def say(session: DraftSession, tokens: list[int], step: int = 1) -> None:
    """Drafts and is told the tokens, some at a time."""
    for start in range(0, len(tokens), step):
        session.observe(tokens[start : start + step])
        session.draft(tokens[min(start + step, len(tokens)) - 1], None, None)


def test_what_followed_is_proposed_and_the_root_is_the_token_just_chosen() -> None:
    tree = draft([1, 2, 3, 4, 5, 9, 1, 2, 3, 4], max_depth=3)
    assert tree.tokens[0] == 4 and chains(tree) == [[5, 9, 1]]


def test_where_nothing_matches_the_pass_is_plain() -> None:
    for ids in ([7], [1, 2, 3, 4, 5], [1, 5, 2, 5]):
        assert draft(ids).tokens == (ids[-1],)


def test_what_followed_in_several_places_branches() -> None:
    tree = draft([1, 2, 3, 5, 6, 1, 2, 3, 7, 8, 1, 2, 3], prices=FREE, max_depth=2)
    assert chains(tree) == [[7, 8], [5, 6]]


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5, None])
def test_no_more_nodes_than_the_limit_are_drafted(limit: int | None) -> None:
    ids = [1, 2, 5, 6, 7, 8, 9, 1, 2, 4, 3, 1, 2]
    tree = draft(ids, limit=limit)
    assert tree.size - 1 <= USUAL_PRICES.largest if limit is None else tree.size - 1 <= limit
    assert (tree.size == 1) == (limit == 0)


def test_no_more_is_drafted_than_pays() -> None:
    ids = [1, 2, 3, 4, 5, 9, 1, 2, 3, 4]
    assert draft(ids, prices=COSTLY).size == 1
    session = SuffixDrafter().begin(ids)
    sizes = []
    for prices in (COSTLY, USUAL_PRICES, FREE):
        session.price(prices)
        sizes.append(session.draft(4, None, None).size)
    assert sizes[0] == 1 < sizes[1] < sizes[2] <= 13


def test_a_session_knows_the_texts_of_sessions_that_are_gone() -> None:
    drafter = SuffixDrafter()
    session = drafter.begin([1, 2, 3])
    say(session, [4, 5, 6, 7])
    assert drafter.begin([9, 3, 4, 5]).draft(5, None, None).size == 1
    del session
    assert chains(drafter.begin([9, 3, 4, 5]).draft(5, None, None)) == [[6, 7]]
    forgetful = SuffixDrafter(session_tokens=0)
    say(forgetful.begin([1, 2, 3]), [4, 5, 6, 7])
    assert forgetful.begin([9, 3, 4, 5]).draft(5, None, None).size == 1


def test_what_is_decoded_plainly_teaches_nothing() -> None:
    drafter = SuffixDrafter()
    session = drafter.begin([1, 2, 3])
    session.observe([4, 5, 6, 7])
    del session
    assert drafter.begin([9, 3, 4, 5]).draft(5, None, None).size == 1


def test_another_text_is_followed_where_more_of_the_context_stands_there() -> None:
    drafter = SuffixDrafter(max_depth=1)
    say(drafter.begin([1, 2, 3]), [4, 5, 6])
    assert chains(drafter.begin([4, 5, 7, 8, 3, 4, 5]).draft(5, None, None)) == [[6], [7]]
    assert chains(drafter.begin([3, 4, 5, 7, 3, 4, 5]).draft(5, None, None)) == [[7]]


def test_a_drafter_that_is_always_wrong_falls_silent_and_finds_its_voice_again() -> None:
    drafter = SuffixDrafter(session_tokens=0)
    session = drafter.begin([1, 2])
    for number in range(400):
        say(session, [1000 + number, 1, 2])
    assert session.draft(2, None, None).size == 1
    for _ in range(200):
        say(session, [3, 4, 5, 6, 1, 2])
    assert session.draft(2, None, None).size > 4


def test_guesses_are_proposed_beside_those_of_others() -> None:
    candidates = Candidates()
    candidates.graft([5, 8], [0.9, 0.9])
    session = SuffixDrafter(max_depth=2).begin([1, 2, 3, 4, 5, 9, 1, 2, 3, 4])
    assert session.propose(4, None, candidates)
    assert candidates.tokens[1:] == [5, 8, 9]


def test_drafting_twice_is_drafting_once() -> None:
    ids = [1, 2, 3, 4, 5, 9, 1, 2, 3, 4]
    session = SuffixDrafter().begin(ids)
    first = session.draft(4, None, None)
    assert session.draft(4, None, None) == first
    session.observe([5])
    assert session.draft(5, None, None).tokens[1] == 9


def test_a_copy_and_a_pickle_draft_the_same() -> None:
    drafter = SuffixDrafter()
    say(drafter.begin([1, 2, 3]), [4, 5, 6, 1, 2, 3, 4, 5, 6, 7])
    drafter.begin([])
    ids = [8, 3, 4, 5, 6]
    expected = drafter.begin(ids).draft(6, None, None)
    assert expected.size > 1
    for twin in (copy.copy(drafter), copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert twin.begin(ids).draft(6, None, None) == expected


def corpus_of(folder: Path, *texts: list[int]) -> SuffixCorpus:
    corpus = SuffixCorpus(folder)
    corpus.add(texts)
    return corpus


def test_the_corpus_is_asked_for_more_than_stands_at_hand(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [1, 2, 3, 4, 5, 6])
    assert chains(draft([9, 1, 2, 3, 4], corpus=corpus)) == [[5, 6]]
    assert draft([9, 2, 3, 4], corpus=corpus).size == 1  # less than the corpus answers to
    assert chains(draft([2, 3, 4, 7, 1, 2, 3, 4], corpus=corpus, max_depth=1)) == [[5], [7]]
    assert chains(draft([1, 2, 3, 4, 7, 1, 2, 3, 4], corpus=corpus, max_depth=1)) == [[7]]


def test_what_another_process_added_is_known_to_the_next_request(tmp_path: Path) -> None:
    drafter = SuffixDrafter(corpus=SuffixCorpus(tmp_path))
    running = drafter.begin([1, 2, 3, 4])
    corpus_of(tmp_path, [1, 2, 3, 4, 5, 6])
    assert running.draft(4, None, None).size == 1
    assert chains(drafter.begin([1, 2, 3, 4]).draft(4, None, None)) == [[5, 6]]


def test_a_corpus_that_misleads_costs_the_text_s_own_matches_nothing(tmp_path: Path) -> None:
    """What is counted of drafts from the corpus is counted by itself."""
    corpus = corpus_of(tmp_path, *([number, 2, 3, 4, 5, 6] for number in range(1000, 1400)))
    drafter = SuffixDrafter(session_tokens=0, corpus=corpus)
    own = drafter.evidence.row(Support.ALONE)
    for number in range(1000, 1400):
        session = drafter.begin([number, 2, 3, 4])
        session.draft(4, None, None)
        session.observe([7])
    assert drafter.begin([1000, 2, 3, 4]).draft(4, None, None).size == 1
    assert drafter.evidence.row(Support.ALONE) == own
    assert drafter.begin([1, 2, 3, 4, 5, 9, 1, 2, 3, 4]).draft(4, None, None).size > 1


def test_a_copy_and_a_pickle_know_the_corpus(tmp_path: Path) -> None:
    drafter = SuffixDrafter(corpus=corpus_of(tmp_path, [1, 2, 3, 4, 5, 6]))
    for twin in (copy.copy(drafter), copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert chains(twin.begin([1, 2, 3, 4]).draft(4, None, None)) == [[5, 6]]


@pytest.mark.parametrize(
    ("settings", "named"), [({"max_depth": 0}, "max_depth"), ({"session_tokens": 5}, "session_tokens")]
)
def test_numbers_out_of_range_are_named(settings: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SuffixDrafter(**settings)
