"""The choice is torch's arg-max of float32 logits, ties, nan and all."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.prepared.choice import likeliest, most_likely


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.float64], ids=str)
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 100),
    count=st.integers(1, 9),
    seed=st.integers(0, 999),
    temperature=st.sampled_from([0.7, 1.0, 1.35]),
)
def test_the_best_guesses_have_the_chances_of_the_softmax(dtype, rows, width, count, seed, temperature):
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(rows, width, generator=generator)).round(decimals=1).to(dtype)
    places, chances = likeliest(logits, count, temperature)
    whole = (logits.double() / temperature).softmax(-1)
    assert places.shape == chances.shape == (rows, min(count, width))
    assert all(len({*row}) == len(row) for row in places.tolist())
    assert torch.allclose(whole.gather(1, places), whole.topk(places.shape[1]).values)
    assert torch.allclose(chances.double(), whole.gather(1, places), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_guesses_of_logits_with_nan_have_no_chance(dtype):
    logits = torch.zeros(1, 37, dtype=dtype)
    logits[0, 20] = float("nan")
    assert likeliest(logits, 3)[1].isnan().all()


def test_masked_logits_are_no_guesses():
    logits = torch.full((1, 40), float("-inf"))
    logits[0, 17] = 0.0
    places, chances = likeliest(logits, 3)
    assert places[0, 0] == 17 and len({*places[0].tolist()}) == 3
    assert chances.tolist() == [[1.0, 0.0, 0.0]]
