"""Hydra heads begin as the target's own LM head and read the tokens before the one they guess, and no later ones."""

import pytest
import torch

from medusa_spec.heads import HeadsConfig, HydraHeads, Projection, TokenEmbedding
from medusa_spec.heads.config import LM_HEADS, RESIDUALS

H, V, K = 8, 20, 3


def make(*, lm_head="shared", layers=2, trained=False, residual="identity"):
    whole = Projection(weight=torch.randn(V, H, dtype=torch.float64), scale=0.5)
    embedding = TokenEmbedding(weight=torch.randn(V, H, dtype=torch.float64), scale=2.0)
    config = HeadsConfig(
        hidden_size=H,
        vocab_size=V,
        kind="hydra",
        num_heads=K,
        num_layers=layers,
        lm_head=lm_head,
        rank=4,
        residual=residual,
    )
    heads = HydraHeads(config, whole, None, embedding).double()
    if trained:
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return heads, whole


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("lm_head", LM_HEADS)
def test_every_fresh_head_is_the_targets_lm_head(lm_head, layers, residual):
    heads, whole = make(lm_head=lm_head, layers=layers, residual=residual)
    h, tokens = torch.randn(2, 5, H, dtype=torch.float64), torch.randint(0, V, (2, 5, K))
    torch.testing.assert_close(heads(h, tokens), whole(h).expand(K, -1, -1, -1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_head_depends_on_the_tokens_before_its_own_and_on_no_others(residual):
    heads, _ = make(trained=True, residual=residual)
    h, tokens = torch.randn(H, dtype=torch.float64), torch.randint(0, V, (K,))
    before = heads(h, tokens)
    for changed in range(K):
        other = tokens.clone()
        other[changed] = (other[changed] + 1) % V
        after = heads(h, other)
        for k in range(K):
            assert torch.equal(after[k], before[k]) == (changed > k), (changed, k)


def test_a_linear_residual_is_added_to_the_first_block_of_every_head():
    heads, whole = make(trained=True, residual="linear", layers=2)
    h, tokens = torch.randn(H, dtype=torch.float64), torch.randint(0, V, (K,))
    for k, head in enumerate(heads.heads):
        x = torch.cat([h, *heads.embedding(tokens[: k + 1])])
        z = head.residual.weight @ x + head.residual.bias
        z = z + torch.nn.functional.silu(head.first.weight @ x + head.first.bias)
        z = z + torch.nn.functional.silu(head.blocks[0].linear(z))
        torch.testing.assert_close(heads(h, tokens)[k], whole(z))


@pytest.mark.parametrize("residual", RESIDUALS)
def test_gradients_reach_every_parameter_and_neither_projection_nor_embedding(residual):
    heads, _ = make(trained=True, residual=residual)
    heads(torch.randn(4, H, dtype=torch.float64), torch.randint(0, V, (4, K))).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in heads.parameters())
    assert not heads.projection.weight.requires_grad and not heads.embedding.weight.requires_grad
    assert not any("embedding" in name or "projection" in name for name in heads.state_dict())


def test_heads_share_no_storage():
    tensors = list(make()[0].parameters())
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_casting_takes_the_embedding_along():
    heads = make()[0].float()
    assert heads.embedding.weight.dtype == heads.projection.weight.dtype == torch.float32


def test_heads_without_tokens_are_an_error():
    heads, _ = make()
    with pytest.raises(ValueError, match="tokens must be given"):
        heads(torch.randn(H, dtype=torch.float64))
