"""Chances begin as believed, become the frequencies that were seen, and never fall as matches grow longer."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.drafters.evidence import BELIEVED, BOUNDS, MEMORY, Evidence, Support, bucket_of, rising

SEEN = st.lists(st.tuples(st.sampled_from(list(Support)), st.integers(2, 40), st.booleans()), max_size=60)
SERIES = st.lists(st.tuples(st.floats(0.0, 9.0), st.floats(0.5, 9.0)), min_size=1, max_size=7)


def test_before_anything_was_counted_chances_are_what_is_believed() -> None:
    for support in Support:
        assert Evidence().row(support) == pytest.approx(BELIEVED[support])


@given(st.integers(2, 60))
def test_a_length_is_in_the_bucket_of_the_first_bound_that_holds_it(length: int) -> None:
    bucket = bucket_of(length)
    assert all(length > bound for bound in BOUNDS[:bucket])
    assert bucket == len(BOUNDS) or length <= BOUNDS[bucket]


@given(SEEN)
def test_chances_never_fall_as_matches_grow_longer_and_stay_between_none_and_certain(seen) -> None:
    request = Evidence(Evidence())
    for support, length, right in seen:
        request.learn(support, length, right)
        for evidence in (request, request.prior):
            row = evidence.row(support)
            assert all(one <= other + 1e-12 for one, other in pairwise(row))
            assert 0 < row[0] and row[-1] < 1


def test_chances_become_the_frequencies_that_were_seen() -> None:
    dice, evidence = random.Random(0), Evidence()
    truth = {2: 0.05, 3: 0.1, 4: 0.5, 6: 0.55, 9: 0.6, 14: 0.65, 22: 0.9, 30: 0.99}
    for _ in range(3000):
        for length, chance in truth.items():
            evidence.learn(Support.ALONE, length, dice.random() < chance)
    for length, chance in truth.items():
        assert evidence.chance(Support.ALONE, length) == pytest.approx(chance, abs=0.03)


def test_what_is_counted_of_one_support_says_nothing_of_another() -> None:
    evidence = Evidence()
    for _ in range(100):
        evidence.learn(Support.ALONE, 5, False)
    assert evidence.chance(Support.ALONE, 5) < 0.2
    for support in set(Support) - {Support.ALONE}:
        assert evidence.row(support) == pytest.approx(BELIEVED[support])


def test_old_counts_give_way() -> None:
    evidence = Evidence()
    for right in (False, True):
        for _ in range(int(3 * MEMORY)):
            evidence.learn(Support.FEW, 40, right)
        assert (evidence.chance(Support.FEW, 40) > 0.9) is right


def test_a_request_begins_with_the_drafters_chances_and_tells_it_what_it_counts() -> None:
    drafter = Evidence()
    first = Evidence(drafter)
    for _ in range(200):
        first.learn(Support.MOST, 9, False)
    assert first.chance(Support.MOST, 9) < drafter.chance(Support.MOST, 9) < 0.2
    second = Evidence(drafter)
    assert second.row(Support.MOST) == pytest.approx(drafter.row(Support.MOST))
    for _ in range(30):
        second.learn(Support.MOST, 9, True)
    assert second.chance(Support.MOST, 9) > 0.6 > 0.4 > drafter.chance(Support.MOST, 9)  # it learns its own text faster


def test_neighbours_that_fall_are_pooled() -> None:
    assert rising([1, 6, 2], [10, 10, 10]) == pytest.approx([0.1, 0.4, 0.4])
    assert rising([3, 2, 1], [1, 1, 1]) == pytest.approx([2, 2, 2])


@given(SERIES)
def test_pooled_means_keep_the_whole_and_change_nothing_that_rises(series) -> None:
    sums, weights = [total for total, _ in series], [weight for _, weight in series]
    means = rising(sums, weights)
    assert all(one <= other + 1e-9 for one, other in pairwise(means))
    assert sum(mean * weight for mean, weight in zip(means, weights, strict=True)) == pytest.approx(sum(sums))
    assert rising([mean * weight for mean, weight in zip(means, weights, strict=True)], weights) == pytest.approx(means)


@given(SERIES, st.floats(0.0, 9.0), st.floats(0.0, 9.0))
def test_no_other_rising_means_are_nearer(series, low, step) -> None:
    """Against lines that rise: a pooled mean is a least-squares fit."""
    sums, weights = [total for total, _ in series], [weight for _, weight in series]
    line = [low + step * place for place in range(len(series))]

    def error(means: list[float]) -> float:
        return sum(w * (s / w - mean) ** 2 for s, w, mean in zip(sums, weights, means, strict=True))

    assert error(rising(sums, weights)) <= error(line) + 1e-9
