"""Recurrent heads begin as the target's own LM head and read only the tokens before their guess."""

import pytest
import torch

from medusa_spec.heads import HeadsConfig, Projection, RecurrentHeads, TokenEmbedding
from medusa_spec.heads.config import LM_HEADS

H, V, K = 8, 20, 3


def make(*, lm_head="shared", layers=1, heads=K, trained=False, **options):
    whole = Projection(weight=torch.randn(V, H, dtype=torch.float64), scale=0.5)
    embedding = TokenEmbedding(weight=torch.randn(V, H, dtype=torch.float64), scale=2.0)
    config = HeadsConfig(
        hidden_size=H,
        vocab_size=V,
        kind="recurrent",
        num_heads=heads,
        num_layers=layers,
        lm_head=lm_head,
        rank=4,
        options=options,
    )
    made = RecurrentHeads(config, whole, None, embedding).double()
    if trained:
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return made, whole


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("lm_head", LM_HEADS)
def test_every_fresh_head_is_the_targets_lm_head(lm_head, layers, tied):
    heads, whole = make(lm_head=lm_head, layers=layers, tied=tied, inner_size=5)
    h, tokens = torch.randn(2, 5, H, dtype=torch.float64), torch.randint(0, V, (2, 5, K))
    torch.testing.assert_close(heads(h, tokens), whole(h).expand(K, -1, -1, -1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_each_state_is_the_one_before_moved_by_the_token(tied):
    heads, whole = make(trained=True, tied=tied, inner_size=5)
    h, tokens = torch.randn(H, dtype=torch.float64), torch.tensor([3, 17, 3])
    z = h
    for k, token in enumerate(tokens):
        part = heads.heads[0 if tied else k]
        e = heads.embedding.weight[token]
        e = e / e.square().mean().sqrt()
        of_state, of_token = part.mix.weight[:, :H], part.mix.weight[:, H:]
        z = z + part.back.weight @ torch.nn.functional.silu(of_state @ z + of_token @ e)
        torch.testing.assert_close(heads(h, tokens)[k], whole(z), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_depends_on_the_tokens_before_its_own_and_on_no_others(tied):
    heads, _ = make(trained=True, tied=tied)
    h, tokens = torch.randn(H, dtype=torch.float64), torch.randint(0, V, (K,))
    before = heads(h, tokens)
    for changed in range(K):
        other = tokens.clone()
        other[changed] = (other[changed] + 1) % V
        after = heads(h, other)
        for k in range(K):
            assert torch.equal(after[k], before[k]) == (changed > k), (changed, k)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lm_head", LM_HEADS)
def test_gradients_reach_every_parameter_and_neither_projection_nor_embedding(lm_head, tied):
    heads, _ = make(trained=True, lm_head=lm_head, layers=2, tied=tied)
    heads(torch.randn(4, H, dtype=torch.float64), torch.randint(0, V, (4, K))).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in heads.parameters())
    assert not heads.projection.weight.requires_grad and not heads.embedding.weight.requires_grad
    assert not any("embedding" in name or "projection" in name for name in heads.state_dict())


def test_tied_heads_have_as_many_weights_at_any_depth():
    few, many = (make(heads=heads)[0] for heads in (2, 9))
    sizes = [sum(p.numel() for p in heads.parameters()) for heads in (few, many)]
    assert sizes[0] == sizes[1] == 3 * H * H
    many.load_state_dict(few.state_dict())


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_share_no_storage(tied):
    state = make(tied=tied, lm_head="own", layers=2)[0].state_dict()
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state)


def test_heads_without_tokens_are_an_error():
    heads, _ = make()
    with pytest.raises(ValueError, match="tokens must be given to recurrent heads"):
        heads(torch.randn(H, dtype=torch.float64))
