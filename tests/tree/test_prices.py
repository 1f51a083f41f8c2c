"""What nodes cost follows from measured times."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.tree import Prices, interpolate

SECONDS = st.lists(st.floats(0.1, 5.0), min_size=3, max_size=3)


def priced(**changes):
    return Prices(**{"token_seconds": 1.0, "level_seconds": 0.0, "pass_seconds": ((1, 1.0), (64, 1.0)), **changes})


@given(SECONDS, st.lists(st.integers(2, 60), min_size=2, max_size=2, unique=True), st.integers(1, 80))
def test_times_are_linear_between_the_measured_sizes_and_do_not_fall_behind_the_last(seconds, sizes, size):
    points = tuple(zip([1, *sorted(sizes)], seconds, strict=True))
    found = priced(pass_seconds=points).seconds
    for known, time in points:
        assert found(known) == time
    for (low, start), (high, stop) in pairwise(points):
        middle = (low + high) // 2
        assert found(middle) == pytest.approx(start + (stop - start) * (middle - low) / (high - low))
    (below, before), (last, final) = points[-2:]
    slope = max(0.0, (final - before) / (last - below))
    assert found(last + size) == pytest.approx(final + size * slope)


def test_one_time_is_that_of_every_size():
    assert interpolate([(4, 2.0)], 1) == interpolate([(4, 2.0)], 100) == 2.0


def test_a_pass_that_gets_faster_with_size_has_free_nodes():
    assert priced(pass_seconds=((1, 1.0), (11, 0.5))).node_price == 0.0


def test_a_tree_costs_what_its_pass_takes_longer_in_tokens():
    prices = priced(token_seconds=0.5, pass_seconds=((1, 1.0), (3, 2.0), (4, 4.0))).prices
    assert prices == pytest.approx((0.0, 1.0, 2.0, 6.0))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"token_seconds": 0.0}, "token_seconds must be above 0, got 0.0"),
        ({"token_seconds": float("nan")}, "token_seconds"),
        ({"token_seconds": float("inf")}, "token_seconds"),
        ({"level_seconds": -0.1}, "level_seconds must be 0 or more, got -0.1"),
        ({"level_seconds": float("nan")}, "level_seconds"),
        ({"pass_seconds": ((1, 1.0),)}, r"two or more sizes N, rising from 1, got \[1\]"),
        ({"pass_seconds": ((2, 1.0), (3, 1.0))}, r"rising from 1, got \[2, 3\]"),
        ({"pass_seconds": ((1, 1.0), (3, 1.0), (3, 2.0))}, "rising from 1"),
        ({"pass_seconds": ((1, 1.0), (2.5, 1.0))}, r"got \[1, 2.5\]"),
        ({"pass_seconds": ((1, 1.0), (3, float("nan")))}, r"times above 0, got \[1.0, nan\]"),
        ({"pass_seconds": ((1, 0.0), (3, 1.0))}, r"times above 0, got \[0.0, 1.0\]"),
    ],
)
def test_prices_that_cannot_be_are_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        priced(**changes)
