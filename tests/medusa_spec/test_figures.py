from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.figures import (
    Run,
    first_difference,
    forecast,
    rates_by_depth,
    speed_ratio,
    tree_size,
)
from medusa_spec.stats import DecodingStats

runs = st.builds(
    Run,
    st.integers(1, 60).map(lambda count: (7,) * count),
    st.floats(0.01, 10, allow_nan=False),
)


def test_ratio_is_of_sums_per_token() -> None:
    # 3 s for 30 tokens against 12 s for 60: 0.1 s a token against 0.2.
    fast = [Run((1,) * 10, 1.0), Run((1,) * 20, 2.0)]
    slow = [Run((1,) * 10, 4.0), Run((1,) * 50, 8.0)]
    assert speed_ratio(fast, slow).value == pytest.approx(2.0)


@given(st.lists(st.tuples(runs, runs), min_size=1, max_size=8))
def test_swapped_arms_give_the_inverse_ratio(pairs: list[tuple[Run, Run]]) -> None:
    left, right = [one for one, _ in pairs], [two for _, two in pairs]
    forth, back = speed_ratio(left, right), speed_ratio(right, left)
    assert forth.value * back.value == pytest.approx(1)
    assert forth.low * back.high == pytest.approx(1, rel=1e-2)


@given(st.lists(st.tuples(runs, runs), min_size=1, max_size=8))
def test_interval_is_ordered_and_within_the_prompts_own_ratios(
    pairs: list[tuple[Run, Run]],
) -> None:
    fast, slow = [one for one, _ in pairs], [two for _, two in pairs]
    ratio = speed_ratio(fast, slow)
    per_token = [(two.seconds / len(two.tokens), one.seconds / len(one.tokens)) for one, two in pairs]
    slowest = max(two for two, _ in per_token) / min(one for _, one in per_token)
    fastest = min(two for two, _ in per_token) / max(one for _, one in per_token)
    assert ratio.low <= ratio.high
    assert fastest * (1 - 1e-9) <= ratio.low and ratio.high <= slowest * (1 + 1e-9)


def test_equal_prompts_have_an_interval_of_no_width() -> None:
    ratio = speed_ratio([Run((1, 2), 1.0)] * 5, [Run((1, 2), 3.0)] * 5)
    assert ratio == pytest.approx((3, 3, 3))


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    import random

    draw, hits = random.Random(0), 0
    for _ in range(200):
        slow = [Run((1,) * 10, 2 * draw.uniform(0.5, 1.5)) for _ in range(30)]
        fast = [Run((1,) * 10, draw.uniform(0.5, 1.5)) for _ in range(30)]
        ratio = speed_ratio(fast, slow)
        hits += ratio.low <= 2 <= ratio.high
    # 95 % nominal; the percentile bootstrap of 30 prompts covers a little less.
    assert 175 <= hits <= 199


def test_seed_alone_decides_the_interval() -> None:
    fast = [Run((1,) * n, 0.1 * n * n) for n in range(1, 9)]
    slow = [Run((1,) * n, 0.3 * n) for n in range(1, 9)]
    assert speed_ratio(fast, slow, seed=3) == speed_ratio(fast, slow, seed=3)
    assert speed_ratio(fast, slow, seed=3) != speed_ratio(fast, slow, seed=4)


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1, 2, 3), 2), ((), (5,), 0)],
)
def test_first_difference(one: tuple[int, ...], other: tuple[int, ...], place: int | None) -> None:
    assert first_difference(one, other) == first_difference(other, one) == place


def test_forecasts_are_the_formulas() -> None:
    per_pass = {
        "prefill": 9.0,
        "draft": 0.1,
        "verify": 1.5,
        "accept": 0.1,
        "keep": 0.1,
        "rest": 0.2,
    }
    found = forecast(tau=2.0, plain_pass=1.0, per_pass=per_pass)
    assert found.honest == pytest.approx(2.0 * 1.0 / (1.5 + 0.5))
    assert found.rule_of_thumb == pytest.approx(2.0 / (2.0 * found.draft_cost + 1))
    assert found.draft_cost == pytest.approx(0.1 / 2.0)


def test_rule_of_thumb_is_honest_where_a_tree_pass_and_the_rest_cost_nothing_more() -> None:
    per_pass = {"draft": 0.25, "verify": 1.0, "accept": 0.0}
    found = forecast(tau=1.7, plain_pass=1.0, per_pass=per_pass)
    assert found.rule_of_thumb == pytest.approx(found.honest) == pytest.approx(1.7 / 1.25)


def test_rates_are_marginal_and_conditional() -> None:
    stats = DecodingStats(drafted_passes=10, accepted_by_depth=[5, 2], offered_by_depth=[10, 4, 1])
    assert rates_by_depth(stats) == [(0.5, 0.5), (0.2, 0.5), (0.0, 0.0)]


def test_tree_size_is_the_mean_over_passes() -> None:
    assert tree_size(DecodingStats(passes=4, pass_sizes=Counter({1: 1, 9: 3}))) == 7
    assert tree_size(DecodingStats()) == 0
