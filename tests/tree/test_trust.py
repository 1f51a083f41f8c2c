"""Trust makes chances frequencies, keeps their order and is not carried away."""

import random
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
    assert Trust().chance(said) == said


@given(OUTCOMES, CHANCES, CHANCES)
def test_chances_stay_chances_in_their_order(outcomes, one, other):
    trust = taught(outcomes)
    low, high = sorted((one, other))
    assert 0.0 <= trust.chance(low) <= trust.chance(high) <= 1.0
    assert trust.chance(0.0) == 0.0 and trust.chance(1.0) == 1.0


@given(OUTCOMES, st.floats(0.01, 0.99))
def test_all_odds_are_moved_by_one_factor(outcomes, said):
    trust = taught(outcomes)
    assert abs(trust.shift) <= FARTHEST
    assert logit(trust.chance(said)) == pytest.approx(logit(said) + trust.shift, abs=1e-6)


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
    assert trust.chance(0.5) > 0.9
    for _ in range(100):
        trust.learn(0.5, False)
    assert trust.chance(0.5) < 0.2
