"""Rows decoded together: who decides for how many, and by what means over them."""

from types import SimpleNamespace

import torch
from transformers import StoppingCriteriaList

from medusa_spec.controller import Plan
from medusa_spec.request import Request, Row
from medusa_spec.stopping import Sequence


class Session:
    levels = 2

    def __init__(self):
        self.priced = []

    def price(self, prices):
        self.priced.append(prices)


class Decider:
    """Notes what it is told."""

    def __init__(self, name):
        self.decisions, self.planned, self.observed = [name], [], []

    def plan(self, prefix, token):
        self.planned.append((prefix, token))
        return Plan(limit=3, prices=self.decisions[0])

    def observe(self, **seen):
        self.observed.append(seen)


def request_of(lengths, controllers=None, **settings):
    rows = [
        Row(
            sequence=Sequence(torch.ones(1, 4, dtype=torch.long), StoppingCriteriaList()),
            unread=None,
            session=Session(),
        )
        for _ in lengths
    ]
    cache = SimpleNamespace(lengths=list(lengths), get_seq_length=lambda: max(lengths))
    return Request(rows=rows, cache=cache, controllers=controllers, **settings)


def test_one_controller_decides_for_as_many_rows_as_run_by_their_means():
    deciders = {rows: Decider(f"for {rows}") for rows in (1, 2, 3)}
    request = request_of([10, 20, 31], deciders.__getitem__)
    request.rows[1].sequence.push(7)
    assert request.plan().limit == 3 and deciders[3].planned == [(20, 1)]
    assert all(row.session.priced == ["for 3"] for row in request.rows)
    request.cache.lengths[:] = [12, 21, 32]  # what was accepted is kept by now, and is no prefix of that pass
    request.learn([0, 1, 2], nodes=11, accepted=4, passed=1.0, step=2.0, draft=0.5)
    told = {"size": 4, "prefix": 20, "accepted": 4 / 3, "levels": 2, "passed": 1.0, "step": 2.0, "draft": 0.5}
    assert deciders[3].observed == [told]
    request.rows[2].done = True
    request.plan()
    assert deciders[2].planned == [(16, 1)]
    assert request.rows[2].session.priced == ["for 3"]
    assert request.decisions == ["for 3", "for 2"]


def test_a_step_that_nobody_planned_is_told_to_nobody():
    """As rows end, the next smaller batch may be one that cannot be timed."""
    first = Decider("for 2")
    request = request_of([10, 20], lambda rows: first if rows == 2 else None)
    request.plan()
    request.rows[1].done = True
    assert request.plan() == Plan(limit=None)
    request.learn([0], nodes=1, accepted=0, passed=1.0, step=1.0)
    assert first.observed == []


def test_without_a_controller_the_limit_that_was_asked_for_holds():
    for request in (request_of([5], draft_nodes=4), request_of([5, 6], lambda rows: None, draft_nodes=4)):
        assert request.plan() == Plan(limit=4)
        request.learn([0], nodes=1, accepted=0, passed=1.0, step=1.0)
        assert request.decisions == []


def test_rows_run_until_they_are_done():
    request, ended = request_of([5, 6]), []
    request.rows[0].ended = lambda: ended.append(0)
    request.rows[0].sequence.eos = {9}
    assert request.rows[0].push(3) is False and not ended and list(request.running) == [0, 1]
    assert request.rows[0].push(9) is True and ended == [0] and list(request.running) == [1]
    assert not request.done
    request.rows[1].done = True
    assert request.done
