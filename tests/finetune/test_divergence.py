"""The divergence of an LM head's distributions, in pieces."""

import pytest
import torch

from medusa_spec.finetune import divergence
from medusa_spec.finetune.divergence import linear_divergence
from medusa_spec.heads import Projection


@pytest.mark.parametrize("chunk", [1, 30, 1 << 20])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (1.0, 2.0), (0.5, 3.0)])
@pytest.mark.parametrize("bias", [False, True])
def test_value_and_gradient_equal_torchs_own(
    monkeypatch: pytest.MonkeyPatch, chunk: int, scale: float, softcap: float | None, bias: bool
) -> None:
    monkeypatch.setattr(divergence, "CHUNK_ELEMENTS", chunk)
    weight, offsets = torch.randn(11, 5).double(), torch.randn(11).double() if bias else None
    projection = Projection(weight=weight, bias=offsets, scale=scale, softcap=softcap)
    teacher = torch.randn(7, 5).double()
    ours, theirs = (teacher + 0.3, teacher + 0.3)
    ours, theirs = (t.clone().requires_grad_() for t in (ours, theirs))
    expected = torch.nn.functional.kl_div(
        projection(theirs).log_softmax(1), projection(teacher).log_softmax(1), log_target=True, reduction="batchmean"
    )
    found = linear_divergence(ours, teacher, projection)
    torch.testing.assert_close(found, expected)
    for loss in (found, expected):
        (3 * loss).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_what_did_not_move_diverges_by_nothing() -> None:
    z = torch.randn(6, 5, dtype=torch.bfloat16, requires_grad=True)
    loss = linear_divergence(z, z.detach(), Projection(weight=torch.randn(9, 5)))
    loss.backward()
    assert loss.item() == 0.0 and z.grad is not None and not z.grad.any()


def test_no_position_gives_zero_and_no_nan() -> None:
    z = torch.zeros(0, 5, requires_grad=True)
    loss = linear_divergence(z, z.detach(), Projection(weight=torch.randn(9, 5)))
    loss.backward()
    assert loss.item() == 0.0
