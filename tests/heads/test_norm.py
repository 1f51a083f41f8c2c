"""The norms of heads divide by the root mean square and leave the mean where it is."""

import torch

from medusa_spec.heads.norm import ScaleShiftNorm, unit_scale


def test_the_root_mean_square_becomes_one_at_any_scale():
    x = torch.randn(3, 4, 64, dtype=torch.float64)
    for scale in (0.1, 1.0, 50.0):
        torch.testing.assert_close(
            unit_scale(scale * x).square().mean(-1).sqrt(), torch.ones(3, 4).double(), atol=1e-3, rtol=0
        )


def test_the_mean_is_not_taken_away():
    x = torch.full((5,), 3.0)
    torch.testing.assert_close(unit_scale(x), torch.ones(5))


def test_zeros_stay_zeros():
    assert torch.equal(unit_scale(torch.zeros(7)), torch.zeros(7))


def test_factor_and_shift_are_trained_and_begin_at_one_and_zero():
    norm, x = ScaleShiftNorm(6), torch.randn(2, 6)
    assert torch.equal(norm(x), unit_scale(x))
    with torch.no_grad():
        norm.weight[2], norm.bias[2] = 4.0, -1.0
    torch.testing.assert_close(norm(x)[:, 2], 4 * unit_scale(x)[:, 2] - 1)
    assert {name for name, _ in norm.named_parameters()} == {"weight", "bias"}
