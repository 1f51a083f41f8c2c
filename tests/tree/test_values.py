import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.tree import PathValues, best_tree, count_paths, values

RANKS = st.integers(1, 3).flatmap(
    lambda heads: st.lists(st.lists(st.integers(-1, 3), min_size=heads, max_size=heads), min_size=1, max_size=30)
)
"""Ranks [T, K] of the truth; -1 and 3 lie outside the width of 3 that is counted."""


@given(RANKS)
def test_a_path_is_counted_where_all_its_guesses_were_right(ranks: list[list[int]]) -> None:
    counted = count_paths(torch.tensor(ranks), width=3)
    inside = {tuple(row[:end]) for row in ranks for end in range(1, len(row) + 1) if set(row[:end]) <= {0, 1, 2}}
    assert set(counted.counts) == inside
    for path, count in counted.counts.items():
        assert count == sum(tuple(row[: len(path)]) == path for row in ranks)


@given(RANKS)
def test_a_single_rank_is_counted_whatever_the_other_heads_said(ranks: list[list[int]]) -> None:
    counted = count_paths(torch.tensor(ranks), width=3)
    assert (counted.total, counted.depth, counted.width) == (len(ranks), len(ranks[0]), 3)
    for head, singles in enumerate(counted.singles):
        assert list(singles) == [sum(row[head] == rank for row in ranks) for rank in range(3)]


@given(RANKS, st.lists(st.integers(0, 2), min_size=3, max_size=3))
def test_values_fall_along_a_path(ranks: list[list[int]], guess: list[int]) -> None:
    counted = count_paths(torch.tensor(ranks), width=3)
    path = tuple(guess[: counted.depth])
    along = [counted.value(path[:end]) for end in range(len(path) + 1)]
    assert along[0] == 1.0 and along[-1] >= 0.0
    assert along == sorted(along, reverse=True)


def test_without_a_prior_the_value_is_the_measured_frequency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "PRIOR_WEIGHT", 1e-12)
    counted = PathValues(total=100, counts={(0,): 40, (0, 0): 20}, singles=((40, 0), (50, 0)))
    assert counted.value((0,)) == pytest.approx(0.4)
    assert counted.value((0, 0)) == pytest.approx(0.2)
    assert counted.value((1,)) == pytest.approx(0.0)


def test_the_prior_is_the_single_frequency_with_its_weight_in_positions() -> None:
    counted = PathValues(total=100, counts={(0,): 40, (0, 0): 20}, singles=((40, 0), (50, 10)))
    weight = values.PRIOR_WEIGHT
    assert counted.value((0,)) == pytest.approx(0.4)  # prior and count agree on a path of one
    assert counted.value((0, 0)) == pytest.approx(0.4 * (20 + weight * 0.5) / (40 + weight))
    # Where the prefix was never seen nothing but the prior is left.
    assert counted.value((1, 1)) == pytest.approx(counted.value((1,)) * 0.1)


def test_no_counted_position_is_an_error() -> None:
    with pytest.raises(ValueError, match="total must be at least 1 .* got 0"):
        PathValues(total=0, counts={}, singles=())


@pytest.mark.parametrize("shape", [(0, 2), (3,), (1, 2, 3)])
def test_ranks_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"ranks must be a non-empty \[T, K\] tensor"):
        count_paths(torch.zeros(shape, dtype=torch.long), width=2)


@pytest.mark.parametrize(
    ("counts", "singles"), [({(0,): 11}, ((4,),)), ({(0,): -1}, ((4,),)), ({}, ((11,),)), ({}, ((4,), (4, 1)))]
)
def test_counts_that_cannot_be_are_refused(counts: dict[tuple[int, ...], int], singles: tuple[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="counts must be|singles must"):
        PathValues(total=10, counts=counts, singles=singles)


def test_values_up_to_a_depth_make_the_best_trees_of_that_depth() -> None:
    values = PathValues(total=10, counts={(0,): 5, (1,): 3, (0, 0): 5, (0, 0, 0): 5}, singles=((5, 3), (5, 1), (5, 1)))
    shallow = values.up_to(2)
    assert shallow.depth == 2
    for path in ((0,), (1,), (0, 0), (1, 1)):
        assert shallow.value(path) == values.value(path)
    assert best_tree(shallow, 4).depth == 2 < best_tree(values, 4).depth
