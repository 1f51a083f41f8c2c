"""A slope is told when there is one to tell, and follows the last points."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.slope import LEAST, Slope


@given(st.floats(-3, 3), st.floats(-3, 3), st.lists(st.integers(0, 5), min_size=LEAST, max_size=60))
def test_points_on_a_line_give_its_slope(slope, start, places):
    found = Slope()
    for x in (0, 5, *places):
        found.add(x, start + slope * x)
    assert found.value == pytest.approx(slope, abs=1e-6)


def test_few_points_or_points_at_one_place_give_none():
    found = Slope()
    for _ in range(LEAST - 1):
        found.add(_ % 2, 1.0)
        assert found.value is None
    alike = Slope()
    for _ in range(100):
        alike.add(3.0, 2.0)
    assert alike.value is None


def test_a_slope_that_changes_is_followed():
    found = Slope()
    for place in range(100):
        found.add(place % 4, 1.0 * (place % 4))
    for place in range(400):
        found.add(place % 4, 3.0 * (place % 4))
    assert found.value == pytest.approx(3.0, rel=0.05)
