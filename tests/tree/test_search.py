from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_spec.tree import (
    PathValues,
    TreeTemplate,
    best_tree,
    count_paths,
    expected_accepted,
    nested_order,
    values,
)

RankPath = tuple[int, ...]
RANKS = st.lists(st.lists(st.integers(-1, 2), min_size=2, max_size=2), min_size=1, max_size=25)
"""Ranks [T, 2] of the truth, -1 where it was not among the guesses."""


def all_paths(counted: PathValues) -> list[RankPath]:
    return [path for depth in range(1, counted.depth + 1) for path in product(range(counted.width), repeat=depth)]


def closed_sets(paths: list[RankPath]) -> list[frozenset[RankPath]]:
    """Every prefix-closed subset, by growing each one by each path that hangs on it."""
    found, edge = {frozenset()}, [frozenset()]
    while edge:
        grown = {have | {path} for have in edge for path in paths if path[:-1] in have or len(path) == 1}
        edge = list(grown - found)
        found |= grown
    return list(found)


@settings(max_examples=25)
@given(RANKS)
def test_the_best_tree_of_every_size_beats_all_prefix_closed_sets(ranks: list[list[int]]) -> None:
    counted = count_paths(torch.tensor(ranks), width=2)
    paths = all_paths(counted)
    best = [0.0] * (len(paths) + 1)
    for closed in closed_sets(paths):
        best[len(closed)] = max(best[len(closed)], sum(counted.value(path) for path in closed))
    assert expected_accepted(counted, len(paths)) == pytest.approx(best)
    for size, expected in enumerate(best):
        assert sum(map(counted.value, best_tree(counted, size).paths)) == pytest.approx(expected)


@given(RANKS, st.integers(0, 14))
def test_trees_are_nested_and_their_gains_fall(ranks: list[list[int]], size: int) -> None:
    counted = count_paths(torch.tensor(ranks), width=3)
    order = nested_order(counted, size)
    gains = [counted.value(path) for path in order]
    assert order == nested_order(counted, 14)[:size]
    assert set(best_tree(counted, size).paths) == set(order)
    assert gains == sorted(gains, reverse=True)


@given(RANKS)
def test_every_prefix_of_the_order_is_a_tree(ranks: list[list[int]]) -> None:
    order = nested_order(count_paths(torch.tensor(ranks), width=3), 12)
    for size in range(13):
        TreeTemplate(paths=tuple(order[:size]))  # refuses a set that is not prefix-closed


@pytest.mark.parametrize("size", [0, 1, 3, 7, 12])
def test_expected_accepted_is_the_mean_count_of_a_replay(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "PRIOR_WEIGHT", 1e-12)
    ranks = torch.randint(0, 4, (200, 3))
    counted = count_paths(ranks, width=3)
    template = best_tree(counted, size)
    accepted = sum(tuple(row[:depth]) in template.paths for row in ranks.tolist() for depth in (1, 2, 3))
    assert expected_accepted(counted, size)[-1] == pytest.approx(accepted / len(ranks), abs=1e-9)


def test_exhausted_paths_end_the_order() -> None:
    counted = PathValues(total=10, counts={(0,): 5}, singles=((5, 1), (2, 2)))
    assert len(nested_order(counted, 100)) == 2 + 4
    assert len(expected_accepted(counted, 100)) == 1 + 2 + 4


def test_equal_values_go_to_the_shallower_path_then_to_the_lower_rank() -> None:
    counted = PathValues(total=1, counts={}, singles=((0, 0), (0, 0)))
    assert nested_order(counted, 4) == [(0,), (1,), (0, 0), (0, 1)]


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="size must be 0 or more draft nodes, got -1"):
        nested_order(PathValues(total=1, counts={}, singles=()), -1)
