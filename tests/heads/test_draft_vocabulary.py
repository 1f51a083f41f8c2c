import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.heads import coverage, index_of, most_frequent

COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=20)


@given(COUNTS, st.data())
def test_no_token_left_out_is_more_frequent_than_one_that_is_in(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    ids = most_frequent(torch.tensor(counts), size).tolist()
    assert len(ids) == size and ids == sorted(set(ids))
    out = set(range(len(counts))) - set(ids)
    # Equal counts go to the lower id.
    assert all((counts[inside], -inside) > (counts[outside], -outside) for inside in ids for outside in out)


@given(COUNTS, st.data())
def test_required_tokens_are_in_however_rare(counts: list[int], data: st.DataObject) -> None:
    always = data.draw(st.sets(st.integers(0, len(counts) - 1)))
    size = data.draw(st.integers(max(1, len(always)), len(counts)))
    given_counts = torch.tensor(counts)
    ids = most_frequent(given_counts, size, always=always)
    assert always <= set(ids.tolist()) and len(ids) == size
    assert given_counts.tolist() == counts  # the caller's counts are not changed


@pytest.mark.parametrize("size", [0, 4])
def test_a_size_outside_the_vocabulary_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"size must be in 1\.\.3 .* got {size}"):
        most_frequent(torch.tensor([1, 2, 3]), size)


def test_more_required_tokens_than_places_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="size must be at least 2, .* got 1"):
        most_frequent(torch.tensor([1, 2, 3]), 1, always=[0, 2, 2])


def test_coverage_is_the_share_of_counted_tokens() -> None:
    counts = torch.tensor([6, 1, 3, 0])
    assert coverage(counts, torch.tensor([0, 2])) == pytest.approx(9 / 10)
    assert coverage(counts, torch.arange(4)) == 1.0
    assert coverage(torch.zeros(4, dtype=torch.long), torch.tensor([0])) == 0.0


@given(st.sets(st.integers(0, 11), min_size=1))
def test_index_of_is_the_inverse(chosen: set[int]) -> None:
    ids = torch.tensor(sorted(chosen))
    inverse = index_of(ids, 12)
    assert torch.equal(inverse[ids], torch.arange(len(ids)))
    assert set((inverse == -1).nonzero().flatten().tolist()) == set(range(12)) - chosen
