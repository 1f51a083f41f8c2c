"""The choice is torch's arg-max of float32 logits, ties, nan and all."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.prepared.choice import most_likely


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float16], ids=str)
@given(rows=st.integers(1, 9), width=st.integers(1, 100), seed=st.integers(0, 999), levels=st.integers(1, 50))
def test_it_is_the_first_of_the_largest(dtype, rows, width, seed, levels):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-levels, levels, (rows, width), generator=generator).to(dtype)  # few values: many ties
    assert most_likely(logits) == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("place", [0, 5, 16, 33, 34])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.0e38])
def test_what_stands_out_is_found_wherever_it_stands(dtype, place, value):
    logits = torch.full((2, 35), float("-inf"), dtype=dtype)
    logits[1, place] = value
    assert most_likely(logits) == logits.float().argmax(-1).tolist() == [0, place]


def test_rows_that_do_not_lie_side_by_side_are_read_as_they_are():
    logits = torch.randn(7, 40).bfloat16()
    assert most_likely(logits.T) == logits.T.float().argmax(-1).tolist()
    assert most_likely(logits[:, ::3]) == logits[:, ::3].float().argmax(-1).tolist()
