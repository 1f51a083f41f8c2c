import torch

from medusa_spec.heads import TokenEmbedding


def test_it_is_the_rows_times_the_factor():
    weight, ids = torch.randn(7, 3), torch.tensor([[0, 6], [2, 2]])
    assert torch.equal(TokenEmbedding(weight=weight)(ids), weight[ids])
    assert torch.equal(TokenEmbedding(weight=weight, scale=3.0)(ids), weight[ids] * 3.0)


def test_casting_keeps_the_factor():
    cast = TokenEmbedding(weight=torch.randn(7, 3), scale=3.0).to(torch.float64)
    assert cast.weight.dtype == torch.float64 and cast.scale == 3.0
