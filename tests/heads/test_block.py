import torch

from medusa_spec.heads.block import ResidualBlock


def test_a_fresh_block_is_the_identity_bit_for_bit() -> None:
    x = torch.randn(3, 4, 8)
    assert torch.equal(ResidualBlock(8)(x), x)


def test_a_trained_block_adds_silu_of_a_linear_map() -> None:
    block = ResidualBlock(8).double()
    torch.nn.init.normal_(block.linear.weight)
    torch.nn.init.normal_(block.linear.bias)
    x = torch.randn(5, 8, dtype=torch.float64)
    z = x @ block.linear.weight.T + block.linear.bias
    assert torch.allclose(block(x), x + z * torch.sigmoid(z))


def test_a_fresh_block_learns() -> None:
    block = ResidualBlock(8)
    block(torch.randn(3, 8)).pow(2).sum().backward()
    assert block.linear.weight.grad.abs().max() > 0
    assert block.linear.bias.grad.abs().max() > 0
