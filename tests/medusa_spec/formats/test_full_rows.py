"""An LM head over all V tokens makes the guesses of one over a draft vocabulary."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.formats.full_rows import each_lm_head, full_rows, has_bias, shared_lm_head

DRAFT = torch.tensor([1, 5, 9, 70, 127])
V = 128


@given(st.integers(0, 2**31), st.integers(2, 12), st.sampled_from([torch.float64, torch.bfloat16]))
def test_no_row_outside_is_ever_the_largest(seed: int, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(40, generator=generator)[:size].sort().values
    weight = torch.randn(size, 6, generator=generator).to(dtype)
    z = torch.randn(30, 6, generator=generator).to(dtype).double() * 5
    inside = z @ weight.double().T
    rows = full_rows(weight, ids, 40)
    assert torch.equal(rows[ids], weight)
    whole = z @ rows.double().T
    torch.testing.assert_close(whole[:, ids], inside, rtol=1e-12, atol=1e-12)  # products of other shapes sum otherwise
    assert torch.equal(whole.argmax(-1), ids[inside.argmax(-1)])


def test_without_a_draft_vocabulary_nothing_is_changed() -> None:
    weight = torch.randn(V, 4)
    assert full_rows(weight, None, V) is weight


@pytest.mark.parametrize("draft", [None, DRAFT])
@pytest.mark.parametrize("lm_head", ["shared", "own", "low_rank"])
def test_each_lm_head_gives_its_heads_logits(lm_head, draft, random_heads) -> None:
    heads = random_heads(lm_head=lm_head, draft=draft, rank=3)
    ids = torch.arange(V) if draft is None else draft
    z = torch.randn(7, 32, dtype=torch.float64)
    for k, weight in enumerate(each_lm_head(heads)):
        assert weight.shape == (V, 32)
        torch.testing.assert_close((z @ weight.T)[:, ids], heads.head(k).logits(z, heads.projection))


def test_the_shared_lm_head_is_the_targets_own(random_heads, target) -> None:
    assert torch.equal(shared_lm_head(random_heads()), target.lm_head.weight)
    assert torch.equal(shared_lm_head(random_heads(draft=DRAFT))[DRAFT], target.lm_head.weight[DRAFT])


@pytest.mark.parametrize("draft", [None, DRAFT])
def test_the_targets_factor_is_part_of_lm_heads_that_are_not_its_own(draft, random_heads, target, monkeypatch) -> None:
    monkeypatch.setattr(target, "_post_processing", lambda: (0.25, None), raising=False)
    heads = random_heads(lm_head="own", draft=draft)
    ids = torch.arange(V) if draft is None else draft
    z = torch.randn(7, 32, dtype=torch.float64)
    torch.testing.assert_close((z @ each_lm_head(heads)[1].T)[:, ids], heads.head(1).logits(z, heads.projection))
    torch.testing.assert_close(shared_lm_head(random_heads(draft=DRAFT))[DRAFT], target.lm_head.weight[DRAFT] / 4)


def test_a_bias_is_one_that_adds_something(random_heads) -> None:
    assert not has_bias(random_heads()) and not has_bias(random_heads(lm_head="own"))
    heads = random_heads(lm_head="own", lm_head_bias=True)
    assert has_bias(heads)
    for head in heads.heads:
        head.lm_head.bias.zero_()
    assert not has_bias(heads)
