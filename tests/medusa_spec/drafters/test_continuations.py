"""Guesses below guesses are made from the places that are left, and every guess below a right one is counted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.drafters.continuations import WIDTH, Continuations
from medusa_spec.drafters.evidence import Evidence, Support
from medusa_spec.drafters.text_index import Place
from medusa_spec.tree import Candidates

PLACES = st.lists(
    st.builds(Place, st.integers(2, 12), st.lists(st.integers(0, 2), min_size=1, max_size=5)), min_size=1, max_size=6
)


class Notes(Evidence):
    """Evidence that also writes down what it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.learnt: list[tuple[Support, int, bool]] = []

    def learn(self, support: Support, length: int, right: bool) -> None:
        self.learnt.append((support, length, right))


def added(places: list[Place], floor: float = 0.0) -> tuple[Continuations, Candidates]:
    continuations, candidates = Continuations(places, Notes()), Candidates()
    continuations.add_to(candidates, floor)
    return continuations, candidates


def by_path(candidates: Candidates) -> dict[tuple[int, ...], float]:
    paths: list[tuple[int, ...]] = [()]
    for parent, token in zip(candidates.parents[1:], candidates.tokens[1:], strict=True):
        paths.append((*paths[parent], token))
    return dict(zip(paths, candidates.values, strict=True))


def test_chances_multiply_along_a_path_as_matches_grow_and_places_fall_away() -> None:
    _, candidates = added([Place(3, [5, 6, 7]), Place(3, [5, 8])])
    chance = Evidence().chance
    first = chance(Support.AGREED, 3)
    values = by_path(candidates)
    assert values == {
        (): 1.0,
        (5,): pytest.approx(first),
        (5, 6): pytest.approx(first * chance(Support.FEW, 4)),
        (5, 8): pytest.approx(first * chance(Support.SECOND, 4)),
        (5, 6, 7): pytest.approx(first * chance(Support.FEW, 4) * chance(Support.ALONE, 5)),
    }


def test_of_several_tokens_the_longest_match_speaks_first_and_of_equals_the_most_places() -> None:
    chance = Evidence().chance
    _, candidates = added([Place(4, [1]), Place(6, [2]), Place(4, [1]), Place(4, [3])])
    assert candidates.values[1:] == pytest.approx(
        [chance(Support.FEW, 6), chance(Support.SECOND, 4), chance(Support.FURTHER, 4)]
    )
    assert candidates.tokens[1:] == [2, 1, 3]
    _, candidates = added([Place(4, [1]), Place(4, [2]), Place(4, [2])])
    assert candidates.tokens[1:] == [2, 1]
    assert candidates.values[1] == pytest.approx(chance(Support.MOST, 4))


def test_places_with_less_than_half_of_the_longest_match_say_nothing() -> None:
    _, candidates = added([Place(9, [1]), Place(4, [2]), Place(5, [3])])
    assert candidates.tokens[1:] == [1, 3]


def test_a_node_has_few_guesses() -> None:
    _, candidates = added([Place(3, [token]) for token in range(9)])
    assert len(candidates.values) == 1 + WIDTH


@given(PLACES, st.floats(0.0, 0.9))
def test_no_guess_is_below_the_floor_and_all_others_are_there(places: list[Place], floor: float) -> None:
    high, low = by_path(added(places, floor)[1]), by_path(added(places)[1])
    assert high == {path: value for path, value in low.items() if not path or value >= floor}


@given(PLACES)
def test_every_path_is_what_followed_somewhere(places: list[Place]) -> None:
    _, candidates = added(places)
    followed = {tuple(place.tokens[:depth]) for place in places for depth in range(len(place.tokens) + 1)}
    assert set(by_path(candidates)) <= followed


@given(PLACES)
def test_of_one_place_all_is_guessed_that_followed_there(places: list[Place]) -> None:
    place = places[0]
    assert (*place.tokens,) in by_path(added([place])[1])


def test_guesses_below_what_was_right_are_counted_and_no_others() -> None:
    continuations, _ = added([Place(3, [5, 6, 7]), Place(3, [5, 8]), Place(3, [9, 9])])
    continuations.learn([5, 8, 1])
    assert continuations.evidence.learnt == [
        (Support.MOST, 3, True),
        (Support.SECOND, 3, False),
        (Support.FEW, 4, False),
        (Support.SECOND, 4, True),
    ]


def test_a_guess_that_was_not_worth_a_node_is_counted_too() -> None:
    continuations, candidates = added([Place(2, [5, 6])], floor=0.9)
    assert len(candidates.values) == 1
    continuations.learn([5, 6])
    assert continuations.evidence.learnt == [(Support.ALONE, 2, True)]


@given(PLACES, st.lists(st.integers(0, 2), max_size=5))
def test_one_guess_below_a_node_is_right_at_most(places: list[Place], said: list[int]) -> None:
    continuations, candidates = added(places)
    continuations.learn(said)
    path = max((path for path in by_path(candidates) if path == tuple(said[: len(path)])), key=len)
    assert sum(right for *_, right in continuations.evidence.learnt) == len(path)


def test_guesses_merge_with_what_others_have_proposed() -> None:
    candidates = Candidates()
    candidates.graft([5, 6], [0.99, 0.5])
    Continuations([Place(3, [5, 6]), Place(3, [4])], Evidence()).add_to(candidates, 0.0)
    assert candidates.tokens[1:3] == [5, 6] and candidates.tokens.count(5) == 1
    assert candidates.values[1] == 0.99
