"""Forecasts of trees: the two formulas, the μ at which a tree pays, and what is best."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.economics import Costs, best_of, by_depth, by_size, forecast_tree, in_batch, paid_back_after

TIMES = {1: 10.0, 4: 12.0, 8: 20.0}
EXPECTED = {1: [0.0, 0.5, 0.7], 2: [0.0, 0.5, 0.9, 1.0, 1.05]}


def costs(**changes):
    return Costs(**{"passes": TIMES, "drafts": {1: 1.0, 2: 2.0}, "rest": 1.0, "reading": 30.0, **changes})


def test_both_formulas_of_one_tree():
    found = forecast_tree(costs(), nodes=3, depth=2, mu=1.0)
    assert found.honest == pytest.approx(2 * 10 / (12 + 2 + 1))
    assert found.rule_of_thumb == pytest.approx(2 / (2 * (2 / 2 / 10) + 1))
    assert found.needed == pytest.approx(15 / 10 - 1)
    unknown = forecast_tree(costs(), nodes=3, depth=2, mu=None)
    assert (unknown.honest, unknown.rule_of_thumb, unknown.needed) == (None, None, found.needed)


@given(st.integers(1, 12), st.floats(0.0, 8.0), st.floats(0.0, 3.0))
def test_a_tree_that_accepts_what_is_needed_is_as_fast_as_plain_decoding(nodes, mu, rest):
    found = forecast_tree(costs(rest=rest), nodes=nodes, depth=1, mu=mu)
    assert (found.honest > 1.0) == (mu > found.needed) or mu == pytest.approx(found.needed)
    assert forecast_tree(costs(rest=rest), nodes=nodes, depth=1, mu=found.needed).honest == pytest.approx(1.0)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=7), st.floats(0.0, 2.0))
def test_the_rule_of_thumb_never_promises_less(gains, rest):
    """It leaves out what a pass over more nodes costs, where one costs more."""
    mu = sum(gains)
    found = forecast_tree(costs(rest=rest), nodes=len(gains), depth=1, mu=mu)
    assert found.rule_of_thumb >= found.honest - 1e-9


def test_every_size_is_given_its_best_depth():
    found = {each.nodes: each for each in by_size(costs(), EXPECTED, [1, 2, 3, 4, 5])}
    assert sorted(found) == [1, 2, 3, 4]  # no counted tree has more
    assert (found[1].depth, found[1].mu) == (1, 0.5)  # the second head gains nothing there, and costs
    assert (found[2].depth, found[2].mu) == (2, 0.9)


def test_every_number_of_heads_is_given_its_best_size():
    one, two = by_depth(costs(), EXPECTED, [1, 2, 3, 4])
    assert (one.depth, one.nodes) == (1, 2) and (two.depth, two.nodes) == (2, 3)
    assert one.honest == pytest.approx(1.7 * 10 / (10 + 4 / 3 + 2))


def test_the_best_has_the_highest_forecast_and_the_smaller_of_equals():
    sizes = by_size(costs(), EXPECTED, [1, 2, 3, 4])
    assert best_of(sizes) == max(sizes, key=lambda found: found.honest)
    free = Costs(passes={1: 1.0, 8: 1.0}, drafts={1: 0.0})
    assert best_of(by_size(free, {1: [0.0, 0.5, 0.5]}, [1, 2])).nodes == 1


def test_without_counts_trees_are_listed_by_what_they_need_and_none_is_best():
    found = by_size(costs(), None, [1, 2, 7])
    assert [(each.depth, each.mu) for each in found] == [(1, None), (2, None), (2, None)]
    assert found[2].needed == pytest.approx(23 / 10 - 1)
    assert best_of(found) is None and best_of([]) is None


def test_a_first_draft_is_paid_back_by_what_tokens_save():
    best = forecast_tree(costs(rest=0.0), nodes=3, depth=2, mu=1.8)  # 2.8 * 10 / 14 = 2: saves 5 of 10 a token
    assert paid_back_after(costs(), best) == 6
    assert paid_back_after(costs(reading=0.0), best) == 0
    lost = forecast_tree(costs(), nodes=3, depth=2, mu=0.0)
    assert paid_back_after(costs(), lost) == inf


def test_in_a_batch_passes_alone_change():
    best = forecast_tree(costs(), nodes=3, depth=2, mu=1.0)
    found = in_batch(costs(), {1: 20.0, 4: 60.0}, best)
    assert found.honest == pytest.approx(2 * 20 / (60 + 2 + 1)) and found.needed == pytest.approx(63 / 20 - 1)


def test_times_between_measured_sizes_lie_on_a_line():
    assert costs().ratio(4) == 1.2 and costs().ratio(6) == 1.6 and costs().plain == 10.0
