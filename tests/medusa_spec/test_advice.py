"""Each reason not to draft is named exactly where the numbers say it."""

import pytest

from medusa_spec.advice import advise
from medusa_spec.economics import Costs, forecast_tree


def costs(**changes):
    return Costs(**{"passes": {1: 10.0, 8: 12.0}, "drafts": {1: 1.0}, "reading": 20.0, **changes})


def advice(found, mu=1.0, batch=None, rows=1):
    best = None if mu is None else forecast_tree(found, nodes=7, depth=1, mu=mu)
    return {each.name: each for each in advise(found, best, batch, rows)}


def test_where_trees_pay_nothing_speaks_against_them():
    found = advice(costs())
    assert {name for name, each in found.items() if each.holds} == set()
    assert "1.54 times as fast" in found["gain"].text
    assert set(found) == {"gain", "kernels", "compute", "short outputs", "temperature", "batches"}


@pytest.mark.parametrize(("mu", "holds"), [(0.2, True), (0.35, True), (0.4, False)])
def test_a_gain_within_what_times_differ_is_none(mu, holds):
    assert advice(costs(), mu)["gain"].holds == holds  # 13 of 10: 1.05 from μ .365 on


def test_where_no_tree_pays_it_says_what_would():
    assert "needs μ 0.30 and gains 0.20. Decode plainly" in advice(costs(), 0.2)["gain"].text


@pytest.mark.parametrize(("seconds", "holds"), [(15.9, False), (16.1, True)])
def test_kernels_that_are_fast_at_one_token_alone_are_named(seconds, holds):
    found = advice(costs(passes={1: 10.0, 2: seconds, 8: 19.0}))["kernels"]
    assert found.holds == holds and ("4-bit" in found.text) == holds


@pytest.mark.parametrize(("seconds", "mu", "holds"), [(19.9, 1.0, False), (20.1, 1.0, True), (20.1, 3.0, None)])
def test_passes_that_arithmetic_bounds_are_named(seconds, mu, holds):
    """Where a small tree pays all the same, they speak against larger ones alone."""
    found = advice(costs(passes={1: 10.0, 8: seconds}), mu)["compute"]
    assert found.holds is holds and ("arithmetic" in found.text) == (seconds > 20)
    assert ("larger than 7" in found.text) == (holds is None)


def test_short_outputs_are_those_that_do_not_pay_for_the_first_draft():
    assert "paid back after 6 tokens" in advice(costs())["short outputs"].text  # 20 of 10 - 6.5 saved a token
    assert "saves nothing" in advice(costs(), 0.1)["short outputs"].text
    assert advice(costs())["short outputs"].holds is None


def test_a_temperature_is_judged_by_the_mu_that_is_needed():
    text = advice(costs())["temperature"].text
    assert "while μ is above 0.30" in text and "counted: 1.00" in text


def test_a_batch_is_judged_by_its_own_times():
    assert advice(costs())["batches"].holds is None
    dear = advice(costs(), batch={1: 10.0, 8: 60.0}, rows=16)["batches"]
    assert dear.holds is True and "Do not draft in batches of 16" in dear.text
    assert advice(costs(), batch={1: 10.0, 8: 11.0}, rows=2)["batches"].holds is False


def test_what_holds_stands_first():
    found = advise(costs(passes={1: 10.0, 8: 40.0}), None)
    assert [each.holds for each in found] == [True, None, False]
    assert found[0].name == "compute"


def test_without_counts_the_needed_mu_is_all_there_is():
    found = advice(costs(), None)
    assert found["gain"].holds is None and set(found) == {"gain", "kernels", "compute"}
