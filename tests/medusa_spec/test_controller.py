"""Drafting is given up when it does not pay, at a price that is bounded, and taken up again when it does."""

import random
from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_spec.controller import (
    LEAST_WAIT,
    LONGEST_LEGACY,
    MOST_REINVESTED,
    PRICE,
    RISK,
    UNLIKELY,
    WARM_UP,
    Controller,
    Experience,
)
from medusa_spec.pass_times import PassTimes

FLAT = {1: 1.0, 2: 1.0, 4: 1.1, 8: 1.4, 16: 2.0, 32: 3.2, 64: 6.0}
NODES = 4


def controller(known: Experience | None = None, **given: object) -> Controller:
    return Controller(**{"times": PassTimes({256: FLAT}), "known": known or Experience(), **given})  # type: ignore[arg-type]


class World:
    """A text whose drafts are right as often as told; time runs in plain steps."""

    def __init__(self, deciding: Controller, draft: float, accepted: Iterable[int]) -> None:
        self.deciding, self.draft = deciding, draft
        self.accepted: Iterator[int] = iter(accepted)
        self.seconds, self.tokens = 0.0, 0
        self.drafting: list[bool] = []

    def step(self) -> None:
        plan = self.deciding.plan(256, self.tokens)
        gained = next(self.accepted)
        size, beside = (1, 0.0) if plan.limit == 0 else (NODES, self.draft)
        gained = 0 if plan.limit == 0 else gained
        passed = self.deciding.times.measured[256][size]
        self.deciding.observe(size=size, prefix=256, accepted=gained, passed=passed, step=passed + beside)
        self.seconds += passed + beside
        self.tokens += 1 + gained
        self.drafting.append(plan.limit != 0)

    def run(self, tokens: int) -> "World":
        while self.tokens < tokens:
            self.step()
        return self


@settings(max_examples=60)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.floats(0.0, 1.0), st.integers(20, 1500))
def test_no_text_costs_more_than_the_stake_and_the_price_of_probes(accepted, draft, tokens):
    world = World(controller(), draft, cycle(accepted)).run(tokens)
    step = FLAT[NODES] + draft
    assert world.seconds <= world.tokens * (1 + PRICE) + RISK + (1 + WARM_UP) * step


@given(st.floats(0.0, 1.0))
def test_drafts_that_are_never_right_are_given_up_after_a_few_passes(draft):
    world = World(controller(), draft, repeat(0)).run(400)
    lost = FLAT[NODES] + draft - 1
    assert sum(world.drafting[:100]) <= RISK / lost + WARM_UP + 2
    assert not all(world.drafting)


def test_drafts_that_always_pay_are_never_given_up():
    world = World(controller(), 0.3, repeat(1)).run(500)
    assert all(world.drafting)


def test_a_short_stretch_of_wrong_drafts_does_not_end_drafting():
    text = cycle([2] * 30 + [0] * 3)
    world = World(controller(), 0.3, text).run(600)
    assert all(world.drafting)


def test_drafting_comes_back_when_the_text_turns_predictable():
    world = World(controller(), 0.3, chain(repeat(0, 300), repeat(2))).run(300)
    assert sum(world.drafting) < 60
    turned = len(world.drafting)
    world.run(900)
    after = world.drafting[turned:]
    assert after[-1] and all(after[after.index(True) + 2 :])  # once it is tried again it stays
    assert after.index(True) <= (RISK + 1) / PRICE


def test_after_a_spell_that_paid_the_next_try_comes_soon():
    world = World(controller(), 0.3, chain(repeat(2, 100), repeat(0, 30), repeat(2))).run(700)
    plain = world.drafting.count(False)
    assert LEAST_WAIT <= plain <= 8 * LEAST_WAIT and world.drafting[-1]


def test_a_text_that_turns_unpredictable_is_left_after_the_stake_is_lost():
    world = World(controller(), 0.3, chain(repeat(3, 200), repeat(0)))
    while world.tokens < 800:
        world.step()
    world.drafting.clear()
    world.run(1200)
    lost = FLAT[NODES] + 0.3 - 1
    assert world.drafting.index(False) <= (RISK + MOST_REINVESTED) / lost + 1


def test_chance_does_not_end_what_pays(seeds=20):
    """Half of the drafts gain two tokens, none does in a row of eight now and then: 1.0 gained, 0.4 needed."""
    share = []
    for seed in range(seeds):
        dice = random.Random(seed)
        world = World(controller(), 0.3, iter(lambda: 2 * dice.randrange(2), None)).run(1000)  # noqa: B023
        share.append(sum(world.drafting) / len(world.drafting))
    assert sum(share) / seeds > 0.9


DEAR = {size: 1.0 + 0.8 * (size - 1) for size in FLAT}
"""Times of passes that are bound by arithmetic, as those of many rows are."""


def test_where_no_chain_could_pay_plain_steps_come_first_in_every_request():
    deciding = controller(times=PassTimes({256: DEAR}), hit=0.6)
    assert not deciding.promising
    world = World(deciding, 0.3, repeat(0)).run(UNLIKELY + 40)
    assert not any(world.drafting[:UNLIKELY]) and world.drafting[UNLIKELY]
    again = controller(known=deciding.known, times=PassTimes({256: DEAR}), hit=0.6)
    assert LONGEST_LEGACY < again.known.wait <= UNLIKELY


@pytest.mark.parametrize(
    ("times", "hit", "level", "promising"),
    [
        (FLAT, 0.6, 0.0, True),
        (FLAT, None, 0.0, True),
        (FLAT, 0.3, 0.4, False),
        (DEAR, 0.9, 0.0, True),
        (DEAR, None, 0.0, True),
        ({1: 1.0, 2: 1.9, 4: 1.9, 16: 2.0}, 0.6, 0.0, True),  # a longer chain pays where a short one does not
    ],
)
def test_what_is_promising_follows_from_times_and_first_guesses(times, hit, level, promising):
    deciding = controller(times=PassTimes({256: times}), hit=hit, level_share=level)
    assert deciding.promising is promising
    assert (deciding.plan(256, 0).limit is None) is promising


def test_reading_the_prompt_is_not_held_against_the_first_drafts():
    deciding = controller()
    for place in range(30):
        assert deciding.plan(256, place).limit is None
        step = 40.0 if place == 0 else 1.4
        deciding.observe(size=NODES, prefix=256, accepted=1, passed=1.1, step=step)
    assert deciding.known.drafted == pytest.approx(1.4, rel=0.05)


def test_one_step_that_somebody_else_held_up_changes_little():
    deciding = controller()
    for place in range(60):
        deciding.plan(256, place)
        deciding.observe(size=NODES, prefix=256, accepted=1, passed=1.1, step=90.0 if place == 30 else 1.4)
    assert len(deciding.decisions) == 1 and deciding.needed < 0.6


def test_the_next_request_begins_with_what_the_last_one_learnt():
    known = Experience()
    World(controller(known), 0.5, repeat(0)).run(60)
    assert known.wait > 0
    again = World(controller(known), 0.5, repeat(0)).run(20)
    assert not any(again.drafting)


def test_after_a_text_that_could_not_be_guessed_the_next_one_is_tried_soon():
    known = Experience(wait=10_000)
    world = World(controller(known), 0.3, repeat(2)).run(300)
    assert world.drafting.index(True) == LONGEST_LEGACY and all(world.drafting[LONGEST_LEGACY:])


def test_a_machine_that_slows_down_looks_the_same():
    """Times count in passes over one token of the moment."""
    known = Experience()
    deciding = controller(known)
    for place in range(400):
        slow = 1.0 + place / 100
        deciding.plan(256, place)
        deciding.observe(size=NODES, prefix=256, accepted=1, passed=1.1 * slow, step=1.4 * slow)
    assert known.drafted == pytest.approx(1.4, rel=0.15) and len(deciding.decisions) == 1


def test_decisions_alternate_and_can_be_read():
    world = World(controller(), 0.3, cycle([0] * 80 + [3] * 80)).run(2000)
    decisions = world.deciding.decisions
    assert len(decisions) > 3 and decisions[0].drafting and decisions[0].token == 0
    assert all(one.drafting != other.drafting for one, other in zip(decisions, decisions[1:], strict=False))
    assert str(decisions[1]).startswith(f"from token {decisions[1].token}: plain decoding (a draft gains 0.")


@pytest.mark.parametrize(("limit", "expected"), [(None, 7), (3, 3), (1, 1)])
def test_trees_of_fixed_shape_have_the_size_that_brings_most_tokens_per_second(limit, expected):
    """Up to 8 nodes a pass takes as long as over one, then twice as long."""
    times = PassTimes({256: {1: 1.0, 8: 1.0, 9: 2.0, 64: 2.0}})
    gains = [0.0, 0.4, 0.6, 0.7, 0.78, 0.84, 0.88, 0.9, *[0.91 + n / 1000 for n in range(57)]]
    deciding = Controller(times=times, known=Experience(), limit=limit, expected=gains)
    assert deciding.plan(256, 0).limit == expected


def test_trees_shrink_where_less_is_accepted_than_was_expected():
    gains = [0.0, 0.5, 0.8, 1.0, 1.15, 1.25, 1.3]
    times = PassTimes({256: {1: 1.0, 2: 1.1, 7: 2.1}})
    deciding = Controller(times=times, known=Experience(account=100.0), expected=gains)
    first = deciding.plan(256, 0).limit
    for place in range(160):
        deciding.known.account = 1.0
        size = (deciding.plan(256, place).limit or 0) + 1
        passed = times.seconds(size, 256)
        deciding.observe(size=size, prefix=256, accepted=int(place % 5 == 0), passed=passed, step=passed)
    last = deciding.plan(256, 160).limit
    assert first is not None and last is not None and 1 <= last < first
    assert deciding.known.ratio < 0.7


def test_prices_are_told_at_the_start_and_now_and_then():
    deciding = controller(level_share=0.1)
    told = []
    for place in range(64):
        told.append(deciding.plan(256, place).prices is not None)
        deciding.observe(size=NODES, prefix=256, accepted=2, passed=1.1, step=1.4)
    assert told[0] and 2 <= sum(told) <= 8
    prices = deciding.prices(256)
    assert prices.token_seconds == pytest.approx(deciding.times.seconds(1, 256) * 1.4 / 3, rel=0.1)
    assert prices.level_seconds == pytest.approx(0.1 * deciding.times.seconds(1, 256))
    assert prices.pass_seconds == tuple(deciding.times.table(256).items())


def test_the_price_of_a_level_is_learnt_where_drafts_differ():
    deciding = controller(level_share=0.04)
    assert deciding.prices(256).level_seconds == pytest.approx(0.04)
    for place in range(60):
        deciding.plan(256, place)
        levels = 1 + place % 3
        draft = 0.05 + 0.12 * levels
        deciding.observe(size=NODES, prefix=256, accepted=2, passed=1.1, step=1.1 + draft, draft=draft, levels=levels)
    prices = deciding.prices(256)
    assert prices.level_seconds / deciding.times.seconds(1, 256) == pytest.approx(0.12, rel=0.1)


def test_a_plain_pass_says_nothing_of_drafts():
    known = Experience(wait=5, gain=0.4, drafted=1.5)
    deciding = controller(known)
    assert deciding.plan(256, 0).limit == 0
    deciding.observe(size=1, prefix=256, accepted=0, passed=1.0, step=1.02)
    assert (known.gain, known.drafted, known.wait) == (0.4, 1.5, 4)


def test_passes_for_which_nothing_was_found_cost_nothing(tokens=200):
    """A look-up that has no guess makes a plain pass: no reason to give it up."""
    deciding = controller()
    for place in range(tokens):
        assert deciding.plan(256, place).limit is None
        deciding.observe(size=1, prefix=256, accepted=0, passed=1.0, step=1.001)


def test_the_same_story_gives_the_same_decisions():
    stories = [World(controller(), 0.4, cycle([0, 0, 3, 1])).run(500) for _ in range(2)]
    assert stories[0].deciding.decisions == stories[1].deciding.decisions
    assert list(islice(stories[0].drafting, 50)) == list(islice(stories[1].drafting, 50))
