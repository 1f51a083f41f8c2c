"""Cross-entropy in pieces."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.finetune import losses
from medusa_spec.finetune.losses import depth_weights, linear_cross_entropy
from medusa_spec.heads import Projection


def naive(z: torch.Tensor, projection: Projection, index: list[int]) -> torch.Tensor:
    terms = [-torch.log_softmax(projection(z[t]), dim=0)[truth] for t, truth in enumerate(index) if truth >= 0]
    return torch.stack(terms).mean() if terms else z.sum() * 0


@given(
    st.lists(st.integers(-2, 10), min_size=1, max_size=9).map(lambda xs: [max(x, -1) for x in xs]),
    st.sampled_from([None, 2.0]),
    st.sampled_from([1.0, 0.25]),
    st.booleans(),
    st.integers(1, 40),
)
def test_value_and_gradients_equal_a_naive_loop(
    index: list[int], softcap: float | None, scale: float, with_bias: bool, chunk: int
) -> None:
    made = [torch.randn(len(index), 5), torch.randn(11, 5), torch.randn(11)]
    leaves = [[t.double().requires_grad_() for t in made] for _ in range(2)]
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "CHUNK_ELEMENTS", chunk)
        z, weight, bias = leaves[0]
        results.append(
            linear_cross_entropy(
                z, weight, bias if with_bias else None, torch.tensor(index), scale=scale, softcap=softcap
            )
        )
    z, weight, bias = leaves[1]
    projection = Projection(weight=weight, bias=bias if with_bias else None, scale=scale, softcap=softcap)
    results.append(naive(z, projection, index))
    torch.testing.assert_close(*results)
    for result in results:
        (3 * result).backward()
    for ours, theirs in zip(*leaves, strict=True):
        expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(torch.zeros_like(ours) if ours.grad is None else ours.grad, expected)


def test_an_all_masked_batch_gives_zero_and_no_nan() -> None:
    z = torch.randn(4, 5, requires_grad=True)
    loss = linear_cross_entropy(z, torch.randn(7, 5), None, torch.full((4,), -1))
    loss.backward()
    assert loss.item() == 0.0 and z.grad is not None and torch.equal(z.grad, torch.zeros(4, 5))


def test_a_frozen_lm_head_gets_no_gradient() -> None:
    weight = torch.randn(7, 5)
    linear_cross_entropy(torch.randn(4, 5, requires_grad=True), weight, None, torch.arange(4)).backward()
    assert weight.grad is None


def test_large_logits_do_not_overflow() -> None:
    z = torch.full((2, 1), 1e4, requires_grad=True)
    loss = linear_cross_entropy(z, torch.tensor([[1.0], [-1.0]]), None, torch.tensor([0, 1]))
    loss.backward()
    assert loss.item() == pytest.approx(1e4) and z.grad is not None and z.grad.isfinite().all()


def test_depth_weights_are_powers() -> None:
    assert depth_weights(3, 0.5).tolist() == [1.0, 0.5, 0.25]
