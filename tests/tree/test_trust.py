"""Trust makes chances frequencies, keeps their order and is not carried away."""

import random
from itertools import pairwise
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.tree import Trust
from medusa_spec.tree.trust import FARTHEST

CHANCES = st.floats(0.0, 1.0)
OUTCOMES = st.lists(st.tuples(CHANCES, st.booleans()), max_size=60)


def taught(outcomes):
    trust = Trust()
    for said, right in outcomes:
        trust.learn(said, right)
    return trust


def logit(chance):
    return log(chance / (1.0 - chance))


@given(CHANCES)
def test_at_first_what_is_said_is_believed(said):
    assert Trust().first(said) == said and Trust().all([said, 0.0]) == [said, 0.0]


@given(OUTCOMES, st.lists(CHANCES, min_size=1, max_size=5))
def test_guesses_of_a_place_exclude_each_other_and_keep_their_order(outcomes, weights):
    said = sorted((weight / max(1.0, sum(weights)) for weight in weights), reverse=True)
    trust = taught(outcomes)
    believed = trust.all(said)
    assert believed[0] == trust.first(said[0]) and len(believed) == len(said)
    assert all(0.0 <= low <= high for high, low in pairwise(believed)) and sum(believed) <= 1.0 + 1e-9


def test_other_guesses_stay_as_far_as_the_first_leaves_room():
    trust = taught([(0.5, True)] * 20)
    first, *others = trust.all([0.4, 0.3, 0.1])
    assert first > 0.7 and others == pytest.approx([(1 - first) * 0.75, (1 - first) * 0.25])
    assert trust.all([0.4, 0.01]) == [first, 0.01]
    doubted = taught([(0.5, False)] * 3)
    first, *others = doubted.all([0.5, 0.1, 0.1])
    assert 0.1 < first < 0.5 and others == [0.1, 0.1]


@given(OUTCOMES, st.sampled_from([float("nan"), float("inf"), -1.0]))
def test_what_is_no_chance_teaches_nothing(outcomes, said):
    before, after = taught(outcomes), taught(outcomes)
    after.learn(said, True)
    assert after.shift == before.shift and all(0.0 <= chance <= 1.0 for chance in after.all([0.5, 0.2]))


@given(OUTCOMES, CHANCES, CHANCES)
def test_chances_stay_chances_in_their_order(outcomes, one, other):
    trust = taught(outcomes)
    low, high = sorted((one, other))
    assert 0.0 <= trust.first(low) <= trust.first(high) <= 1.0
    assert trust.first(0.0) == 0.0 and trust.first(1.0) == 1.0


@given(OUTCOMES, st.floats(0.01, 0.99))
def test_all_odds_are_moved_by_one_factor(outcomes, said):
    trust = taught(outcomes)
    assert abs(trust.shift) <= FARTHEST
    assert logit(trust.first(said)) == pytest.approx(logit(said) + trust.shift, abs=1e-6)


@given(OUTCOMES, CHANCES)
def test_what_came_true_is_believed_more_and_what_did_not_less(outcomes, said):
    for right in (True, False):
        before, after = taught(outcomes), taught(outcomes)
        after.learn(said, right)
        assert after.shift >= before.shift if right else after.shift <= before.shift


@pytest.mark.parametrize("factor", [0.25, 1.0, 2.5])
def test_it_learns_by_what_the_odds_are_off(factor):
    draw, trust, shifts = random.Random(3), Trust(), []
    for turn in range(2000):
        said = draw.choice([0.1, 0.3, 0.5, 0.8])
        odds = factor * said / (1.0 - said)
        trust.learn(said, draw.random() < odds / (1.0 + odds))
        if turn >= 100:
            shifts.append(trust.shift)
    assert sum(shifts) / len(shifts) == pytest.approx(log(factor), abs=0.15)


def test_it_follows_a_text_that_changes():
    trust = taught([(0.5, True)] * 200)
    assert trust.first(0.5) > 0.9
    for _ in range(100):
        trust.learn(0.5, False)
    assert trust.first(0.5) < 0.2
