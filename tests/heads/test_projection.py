import torch

from medusa_spec.heads import Projection


def full(**kwargs: object) -> Projection:
    return Projection(
        weight=torch.randn(20, 8, dtype=torch.float64), bias=torch.randn(20, dtype=torch.float64), **kwargs
    )


def test_logits_are_the_targets_formula() -> None:
    projection = full(scale=0.5, softcap=3.0)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    raw = (x @ projection.weight.T + projection.bias) * 0.5
    assert torch.allclose(projection(x), 3.0 * torch.tanh(raw / 3.0))


def test_restricted_rows_give_the_logits_of_those_tokens() -> None:
    projection, ids = full(scale=2.0, softcap=5.0), torch.tensor([3, 0, 17])
    x = torch.randn(4, 8, dtype=torch.float64)
    assert torch.allclose(projection.rows(ids)(x), projection(x)[:, ids])


def test_rows_without_a_bias_stay_without() -> None:
    projection = Projection(weight=torch.randn(20, 8))
    assert projection.rows(torch.tensor([1, 2])).bias is None


def test_no_ids_keep_all_rows() -> None:
    projection = full()
    assert projection.rows(None) is projection


def test_another_dtype_keeps_everything_else() -> None:
    narrow = full(scale=2.0, softcap=5.0).to(torch.float32)
    assert (narrow.weight.dtype, narrow.bias.dtype) == (torch.float32, torch.float32)
    assert (narrow.scale, narrow.softcap) == (2.0, 5.0)
    assert Projection(weight=torch.randn(2, 3)).to(torch.bfloat16).bias is None


def test_a_change_reaches_every_tensor() -> None:
    changed = full(scale=2.0).map(lambda tensor: tensor * 0)
    assert not changed.weight.any() and not changed.bias.any() and changed.scale == 2.0
