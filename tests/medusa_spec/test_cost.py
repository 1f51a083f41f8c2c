import pytest

from medusa_spec import cost
from medusa_spec.backbone import Backbone
from medusa_spec.cost import best_size, interpolate, measure_pass_times
from medusa_spec.errors import ConfigError
from medusa_spec.testing import tiny

TIMES = {1: 10.0, 4: 16.0, 8: 20.0}


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, 10.0),
        (2, 12.0),  # a third of the way from 10 to 16
        (4, 16.0),
        (6, 18.0),  # half of the way from 16 to 20
        (8, 20.0),
        (12, 24.0),  # on with the last slope, 1 per node
        (0, 10.0),
    ],
)
def test_times_between_measured_sizes_lie_on_a_line(size: int, expected: float) -> None:
    assert interpolate(TIMES, size) == pytest.approx(expected)


def test_times_do_not_fall_beyond_what_was_measured() -> None:
    """Two times that are measured may stand in any order: going on with a fall would end below zero."""
    assert interpolate({1: 2.0, 48: 7.0, 64: 5.0}, 1000) == 5.0


def test_one_measured_size_stands_for_all() -> None:
    assert interpolate({4: 2.0}, 1) == interpolate({4: 2.0}, 100) == 2.0


def test_no_measured_size_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least one measured size"):
        interpolate({}, 1)


def test_the_best_size_has_the_most_tokens_per_second() -> None:
    # Rates of n = 0..3 at T(N) = 10, 12, 14, 16: 1/10, 1.5/12 = .125, 1.8/14 = .1286, 1.9/16 = .1188.
    assert best_size([0.0, 0.5, 0.8, 0.9], TIMES) == 2


def test_what_a_drafted_pass_costs_beside_the_target_counts_against_small_trees() -> None:
    # With 10 more for drafting: 1/10, 1.5/22 = .068, 1.8/24 = .075, 1.9/26 = .073: plain decoding is best.
    assert best_size([0.0, 0.5, 0.8, 0.9], TIMES, extra=10.0) == 0
    # With 2 more: 1/10, 1.5/14 = .107, 1.8/16 = .1125, 1.9/18 = .1056.
    assert best_size([0.0, 0.5, 0.8, 0.9], TIMES, extra=2.0) == 2


def test_drafts_that_bring_nothing_are_not_made() -> None:
    assert best_size([0.0, 0.0, 0.0], {1: 1.0}) == 0  # equal rates go to the smaller tree
    assert best_size([0.0], TIMES) == 0


def test_free_nodes_are_all_taken() -> None:
    assert best_size([0.0, 0.3, 0.5, 0.6], {1: 1.0, 64: 1.0}) == 3


def test_a_pass_that_is_fast_at_one_token_alone_is_left_at_that() -> None:
    # As 4-bit kernels are: 1/1, then at most 3/4.
    assert best_size([0.0, 0.9, 1.5, 2.0], {1: 1.0, 2: 4.0, 64: 4.0}) == 0


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_every_size_asked_for_is_timed(name: str) -> None:
    times = measure_pass_times(Backbone(tiny(name)), sizes=(1, 3, 9), prefix=20, repeats=2)
    assert list(times) == [1, 3, 9]
    assert all(0.0 < seconds < 60.0 for seconds in times.values())


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_passes_of_several_rows_have_a_tree_in_each(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, shapes = Backbone(tiny(name)), []
    verify = Backbone.verify

    def noting(self, input_ids, tree_pass, **kwargs):
        shapes.append((tuple(input_ids.shape), list(tree_pass.cache.lengths)))
        return verify(self, input_ids, tree_pass, **kwargs)

    monkeypatch.setattr(Backbone, "verify", noting)
    times = measure_pass_times(backbone, sizes=(1, 5), prefix=20, repeats=1, batch=3)
    assert list(times) == [1, 5] and shapes == [((1, 3), [20] * 3), ((1, 15), [20] * 3)] * 2


def test_the_first_round_and_outliers_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # The warm-up's beginning, whose end is not read; then rounds of 1, 50 and 2 seconds, of which the median is 2.
    ticks = iter([0.0, 0.0, 1.0, 0.0, 50.0, 0.0, 2.0])
    monkeypatch.setattr(cost, "perf_counter", lambda: next(ticks))
    assert measure_pass_times(Backbone(tiny("llama")), sizes=(2,), prefix=5, repeats=3) == {2: 2.0}


@pytest.mark.parametrize("size", [1, 4, 5, 16, 64])
def test_timed_trees_have_the_size_that_they_stand_for(size: int) -> None:
    shape = cost._bush(size)
    assert shape.size == size
    if size >= 5:
        assert shape.max_depth >= 4
