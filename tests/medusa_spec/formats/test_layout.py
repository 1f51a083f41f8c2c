import warnings

import pytest

from medusa_spec.errors import CheckpointError
from medusa_spec.formats.layout import check_names, compare_config, count


@pytest.mark.parametrize(("numbers", "total"), [([], 0), ([0, 0, 0], 1), ([2, 0, 1, 0], 3)])
def test_things_are_counted_by_their_numbers(numbers, total, names):
    assert count(names(), "heads", numbers) == total


@pytest.mark.parametrize("numbers", [[1], [0, 2], [0, 10**12]])
def test_a_gap_is_named(numbers, names):
    with pytest.raises(
        CheckpointError, match=rf"heads must be numbered 0\.\.{len(numbers) - 1}, .* got \[{numbers[0]}"
    ):
        count(names(), "heads", numbers)


def test_missing_and_surplus_names_are_listed_with_both_numbers(names):
    check_names(names(), "Medusa", ["a", "b"], ["b", "a"])
    with pytest.raises(
        CheckpointError, match=r"there, Medusa heads, must hold 2 tensors, got 3: missing \['b'\], surplus \['c', 'd'\]"
    ):
        check_names(names(), "Medusa", ["a", "b"], ["a", "c", "d"])


def test_long_lists_are_cut(names):
    with pytest.raises(CheckpointError, match=r"got 0: missing \['n0', 'n1', .* … \(40 in all\)\]"):
        check_names(names(), "Medusa", [f"n{i}" for i in range(40)], [])


def test_the_config_is_compared_and_a_difference_is_a_warning_with_both_numbers(names):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare_config(names("a", heads=5), "heads", ["heads", "unsaid"], 5)
    with pytest.warns(UserWarning, match="the config says heads = 2, the tensors are those of 5 heads"):
        compare_config(names("a", heads=2), "heads", ["heads"], 5)
