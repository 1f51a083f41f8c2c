"""Losses against the target's probabilities."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_spec.finetune import distillation
from medusa_spec.finetune.distillation import LK_DECAY, TERMS, linear_distillation
from medusa_spec.finetune.losses import linear_cross_entropy
from medusa_spec.heads import Projection

ROWS = 11
LOSSES = st.sampled_from(list(TERMS))


def dense(loss: str, logits: torch.Tensor, p: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """The definitions, over all V logits at once: p is [T, V], zero at tokens that are not kept."""
    if not known.any():
        return logits.sum() * 0
    q, p = logits.softmax(1)[known], p[known]
    mass, alpha = p.sum(1), torch.minimum(p, q).sum(1)
    some = mass > 0
    within = p[some] / mass[some, None]
    divergence = torch.where(within > 0, within * (within.clamp_min(1e-300) / q[some]).log(), 0).sum(1)
    kl = (mass[some] * divergence).sum() / mass.sum()
    variation = (1 - alpha).mean()
    if loss == "lk":
        mix = math.exp(-LK_DECAY * float(alpha.mean().detach()))
        return mix * kl + (1 - mix) * variation
    log = (mass[some] * (mass[some] / alpha[some]).log()).sum() / mass.sum()
    return {"kl": kl, "total_variation": variation, "log_acceptance": log}[loss]


def teacher(positions: int, count: int, seed: int, outside: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [T, k] of random tokens, some that cannot be guessed, and their probabilities, whose sum is below one."""
    dice = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(ROWS, generator=dice)[:count] for _ in range(positions)])
    probs = (3 * torch.randn(positions, ROWS, generator=dice)).softmax(1).sort(1, descending=True).values[:, :count]
    lost = torch.rand(positions, count, generator=dice) < outside
    return torch.where(lost, -1, index), probs.double()


def spread(index: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    p = torch.zeros(len(index), ROWS + 1, dtype=probs.dtype)
    return p.scatter(1, torch.where(index < 0, ROWS, index), probs)[:, :ROWS]


@settings(max_examples=150)
@given(
    LOSSES,
    st.integers(1, 8),
    st.integers(1, ROWS),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.4]),
    st.sampled_from([None, 2.0]),
    st.sampled_from([1.0, 0.25]),
    st.booleans(),
    st.integers(1, 40),
)
def test_value_and_gradients_equal_the_definition_over_all_logits(
    loss: str,
    positions: int,
    count: int,
    seed: int,
    outside: float,
    softcap: float | None,
    scale: float,
    with_bias: bool,
    chunk: int,
) -> None:
    torch.manual_seed(seed)
    index, probs = teacher(positions, count, seed, outside)
    known = torch.rand(positions) < 0.8
    made = [2 * torch.randn(positions, 5), torch.randn(ROWS, 5), torch.randn(ROWS)]
    leaves = [[t.double().requires_grad_() for t in made] for _ in range(2)]
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distillation, "CHUNK_ELEMENTS", chunk)
        z, weight, bias = leaves[0]
        results.append(
            linear_distillation(
                loss, z, weight, bias if with_bias else None, index, probs, known, scale=scale, softcap=softcap
            )
        )
    z, weight, bias = leaves[1]
    projection = Projection(weight=weight, bias=bias if with_bias else None, scale=scale, softcap=softcap)
    p = spread(index, probs)
    if loss == "total_variation" or p[known].any():  # else there is nothing to divide by, and nothing to learn
        results.append(dense(loss, projection(z), p, known))
        torch.testing.assert_close(*results)
        for result in results:
            (3 * result).backward()
        for ours, theirs in zip(*leaves, strict=True):
            expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            torch.testing.assert_close(torch.zeros_like(ours) if ours.grad is None else ours.grad, expected)
    else:
        assert results[0].isfinite()


@pytest.mark.parametrize("loss", [name for name in TERMS if name != "lk"])  # through whose λ no gradient runs
def test_gradients_are_the_slopes_of_the_values(loss: str) -> None:
    torch.manual_seed(3)
    index, probs = teacher(4, 6, 3, 0.2)
    inputs = [torch.randn(4, 5), torch.randn(ROWS, 5), torch.randn(ROWS)]
    leaves = [tensor.double().requires_grad_() for tensor in inputs]
    known = torch.tensor([True, True, False, True])
    assert torch.autograd.gradcheck(
        lambda z, weight, bias: linear_distillation(loss, z, weight, bias, index, probs, known, scale=0.5, softcap=3.0),
        leaves,
    )


@given(st.sampled_from(["kl", "log_acceptance"]), st.lists(st.integers(-1, ROWS - 1), min_size=1, max_size=9))
def test_a_target_that_is_sure_of_one_token_gives_the_cross_entropy(loss: str, truth: list[int]) -> None:
    z, weight, index = torch.randn(len(truth), 5).double(), torch.randn(ROWS, 5).double(), torch.tensor(truth)
    ours, theirs = (z.clone().requires_grad_() for _ in range(2))
    ones = torch.ones(len(truth), 1, dtype=torch.float64)
    known = torch.ones(len(truth), dtype=torch.bool)
    results = [
        linear_distillation(loss, ours, weight, None, index[:, None], ones, known),
        linear_cross_entropy(theirs, weight, None, index),
    ]
    torch.testing.assert_close(*results)
    for result in results:
        result.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@given(LOSSES, st.integers(0, 1000))
def test_no_loss_is_lower_than_that_of_the_targets_own_probabilities(loss: str, seed: int) -> None:
    torch.manual_seed(seed)
    logits = 2 * torch.randn(5, ROWS).double()
    order = logits.argsort(1, descending=True)
    probs = logits.softmax(1).gather(1, order)
    known, eye = torch.ones(5, dtype=torch.bool), torch.eye(ROWS).double()
    best = linear_distillation(loss, logits, eye, None, order, probs, known)
    other = linear_distillation(loss, logits + torch.randn(5, ROWS), eye, None, order, probs, known)
    assert best.item() == pytest.approx(0, abs=1e-9) and other > best


@given(st.integers(0, 1000))
def test_one_minus_the_variation_is_the_share_that_rejection_sampling_accepts(seed: int) -> None:
    """Summed over what is drafted: q(x) min(1, p(x) / q(x))."""
    torch.manual_seed(seed)
    p, logits = torch.randn(1, ROWS).double().softmax(1), torch.randn(1, ROWS).double()
    q = logits.softmax(1)
    accepted = (q * (p / q).clamp_max(1)).sum()
    everything = torch.arange(ROWS)[None]
    loss = linear_distillation(
        "total_variation", logits, torch.eye(ROWS).double(), None, everything, p, torch.tensor([True])
    )
    torch.testing.assert_close(1 - loss, accepted)


@pytest.mark.parametrize("loss", TERMS)
@pytest.mark.parametrize("known", [True, False])
def test_a_batch_that_teaches_nothing_gives_no_gradient_and_no_nan(loss: str, known: bool) -> None:
    z = torch.randn(4, 5, requires_grad=True)
    index = torch.full((4, 3), -1 if known else 2)
    result = linear_distillation(
        loss, z, torch.randn(7, 5), None, index, torch.full((4, 3), 0.2), torch.full((4,), known)
    )
    result.backward()
    assert result.isfinite() and z.grad is not None and torch.equal(z.grad, torch.zeros(4, 5))


@pytest.mark.parametrize("loss", TERMS)
def test_a_head_that_is_sure_of_the_wrong_token_still_gets_a_finite_loss(loss: str) -> None:
    z = torch.tensor([[1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]])
    result = linear_distillation(loss, z, weight, None, torch.tensor([[1]]), torch.ones(1, 1), torch.tensor([True]))
    result.backward()
    assert result.isfinite() and z.grad is not None and z.grad.isfinite().all()
    if loss in ("kl", "log_acceptance"):  # the variation's slope has vanished there: that is why the others exist
        assert result.item() == pytest.approx(2e4) and z.grad.item() == pytest.approx(2.0)


def test_a_frozen_lm_head_gets_no_gradient() -> None:
    weight = torch.randn(7, 5)
    z = torch.randn(4, 5, requires_grad=True)
    index, probs = torch.arange(4)[:, None], torch.ones(4, 1)
    linear_distillation("lk", z, weight, None, index, probs, torch.ones(4, dtype=torch.bool)).backward()
    assert weight.grad is None and z.grad is not None


def test_lk_moves_from_the_divergence_to_the_acceptance_rate() -> None:
    eye, known = torch.eye(3).double(), torch.tensor([True])
    index, probs = torch.arange(3)[None], torch.tensor([[0.98, 0.01, 0.01]]).double()
    shares = []
    for distance in (8.0, 0.3):
        logits = probs.log() + distance * torch.tensor([[-1.0, 0.5, 0.5]]).double()
        kl, variation, lk = (
            float(linear_distillation(loss, logits, eye, None, index, probs, known))
            for loss in ("kl", "total_variation", "lk")
        )
        shares.append((lk - variation) / (kl - variation))
    assert shares[0] > 0.9 and shares[1] < 0.1


@pytest.mark.parametrize("loss", TERMS)
@pytest.mark.parametrize("sharpness", [3.0, 20.0, 60.0])
def test_gradients_hold_no_numbers_too_small_to_compute_fast_with(loss: str, sharpness: float) -> None:
    """What is multiplied back, seen by an LM head that is the identity: softmax and slopes are in it as they are."""
    torch.manual_seed(0)
    z = (sharpness * torch.randn(64, 40)).requires_grad_()
    index = torch.stack([torch.randperm(40)[:4] for _ in range(64)])
    linear_distillation(
        loss, z, torch.eye(40), None, index, torch.full((64, 4), 0.2), torch.ones(64, dtype=torch.bool)
    ).backward()
    assert z.grad is not None and z.grad.any()
    small = z.grad[z.grad != 0].abs().min()
    assert small > torch.finfo(torch.float32).tiny
