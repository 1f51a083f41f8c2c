"""What is found are places where the context stood, all of them as far as is promised, and no memory is forgotten."""

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.drafters import text_index
from medusa_spec.drafters.text_index import LONGEST_MATCH, Place, TextIndex
from medusa_spec.errors import ConfigError

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=1, max_size=3)


def index_of(*texts: list[int], limit: int = 1024) -> TextIndex:
    """All texts but the last have ended."""
    index = TextIndex(limit)
    for text in texts[:-1]:
        index.add(text)
        index.end_text()
    index.add(texts[-1])
    return index


def places(index: TextIndex, context: list[int], **options: int) -> list[tuple[int, list[int]]]:
    return [(length, list(tokens)) for length, tokens in index.find(context, **options)]


def by_search(texts: list[list[int]], context: list[int], above: int, depth: int) -> list[Place]:
    """Every place by comparing everywhere: of long matches, if there are some, else of all."""
    context, found = context[-LONGEST_MATCH:], []
    for number, text in enumerate(texts):
        for place in range(1, len(text)):
            length = 0
            while length < min(place, len(context)) and text[place - 1 - length] == context[-1 - length]:
                length += 1
            after = text[place:]
            while number == len(texts) - 1 and len(after) < depth:
                after = after + text[place:]
            if length >= max(2, above + 1):
                found.append(Place(length, tuple(after[:depth])))
    return [place for place in found if place.length >= 4] if any(p.length >= 8 for p in found) else found


def test_what_followed_is_found_the_most_recent_first() -> None:
    ids = [1, 2, 5, 6, 1, 2, 7, 8, 1, 2]
    assert places(index_of(ids), ids, depth=3) == [(2, [7, 8, 1]), (2, [5, 6, 1])]


def test_long_matches_come_before_short_ones() -> None:
    ids = [1, 2, 3, 4, 5, 9, 3, 4, 6, 1, 2, 3, 4]
    assert places(index_of(ids), ids, depth=1) == [(4, [5]), (2, [6])]


def test_a_loop_goes_on_as_a_loop() -> None:
    ids = [7, 8, 9] * 4
    assert (9, [7, 8, 9, 7, 8, 9, 7]) in places(index_of(ids), ids, depth=7)
    assert places(index_of([5, 5, 5]), [5, 5, 5], depth=4) == [(2, [5, 5, 5, 5])]


def test_a_text_that_has_ended_goes_on_no_further() -> None:
    assert places(index_of([7, 8, 9] * 2), [7, 8], depth=7, running=False) == [(2, [9]), (2, [9, 7, 8, 9])]


def test_nothing_is_found_across_the_end_of_a_text() -> None:
    index = index_of([1, 2], [3, 4, 1, 2])
    assert places(index, [1, 2]) == []
    assert places(index, [2, 3]) == []
    assert places(index_of([1, 2, 3], [8, 9]), [1, 2]) == [(2, [3])]


def test_places_are_asked_for_by_the_length_of_their_match() -> None:
    ids = [1, 2, 3, 4, 5, 9, 3, 4, 6, 1, 2, 3, 4]
    index = index_of(ids)
    assert [length for length, _ in places(index, ids, above=2)] == [4]
    assert places(index, ids, above=4) == []


@given(TEXTS, st.lists(st.integers(0, 2), max_size=40), st.sampled_from([1, 2, 5]), st.integers(1, 9))
def test_all_places_are_found_that_a_search_everywhere_finds(
    texts: list[list[int]], context: list[int], above: int, depth: int
) -> None:
    with patch.object(text_index, "LOOKED_AT", 1000):
        for asked in (context, texts[-1]):
            found = index_of(*texts).find(asked, above=above, depth=depth)
            assert sorted(Place(length, tuple(tokens)) for length, tokens in found) == sorted(
                by_search(texts, asked, above, depth)
            )


@given(TEXTS, st.lists(st.integers(0, 2), max_size=40))
def test_no_more_than_so_many_places_are_looked_at_and_each_of_them_is_one(
    texts: list[list[int]], context: list[int]
) -> None:
    found = [Place(length, tuple(tokens)) for length, tokens in index_of(*texts).find(context, depth=6)]
    assert len(found) <= len(text_index.ORDERS) * text_index.LOOKED_AT
    everywhere = [place for above in (1, 3) for place in by_search(texts, context, above, 6)]
    assert set(found) <= set(everywhere)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(128, 300))
def test_no_more_tokens_are_held_than_the_limit_and_the_last_ones_always(pieces: list[int], limit: int) -> None:
    index, text = TextIndex(limit), list[int]()
    for size in pieces:
        tokens = list(range(len(text), len(text) + size))
        index.add(tokens)
        text += tokens
        assert len(index) <= limit
    known = text[-(limit // 2) :]
    middle = len(known) // 2
    if middle >= 2:
        assert places(index, known[:middle], depth=1) == [(min(middle, LONGEST_MATCH), [known[middle]])]


def test_the_oldest_texts_are_forgotten() -> None:
    index = TextIndex(200)
    for number in range(30):
        index.add(range(20 * number, 20 * number + 20))
        index.end_text()
    assert places(index, [0, 1, 2]) == []
    assert places(index, [580, 581], depth=2) == [(2, [582, 583])]


def test_a_limit_too_small_for_two_contexts_is_named() -> None:
    with pytest.raises(ConfigError, match="limit must be 128 tokens or more, got 127"):
        TextIndex(127)


def test_a_token_takes_no_more_memory_than_is_said() -> None:
    limit = 1 << 14
    index = TextIndex(limit)
    index.add(range(3 * limit))
    arrays = [part for half in index._halves for part in (half.ids, *half.newest, *half.earlier)]
    assert sum(part.itemsize * len(part) for part in arrays) <= 20 * (limit + 2)
