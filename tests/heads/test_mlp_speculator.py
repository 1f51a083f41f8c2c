"""MLP speculators compute what is published, begin without an opinion, and read only the tokens before their guess."""

import math

import pytest
import torch

from medusa_spec.heads import HeadsConfig, Projection, SpeculatorHeads, TokenEmbedding
from medusa_spec.heads.config import LM_HEADS
from medusa_spec.heads.mlp_speculator import scaled, token_factor
from medusa_spec.heads.norm import unit_scale

H, V, K = 8, 20, 3


def make(*, lm_head="shared", layers=1, heads=K, trained=False, **options):
    whole = Projection(
        weight=torch.randn(V, H, dtype=torch.float64), bias=torch.randn(V, dtype=torch.float64), scale=0.5
    )
    embedding = TokenEmbedding(weight=torch.randn(V, H, dtype=torch.float64), scale=2.0)
    config = HeadsConfig(
        hidden_size=H,
        vocab_size=V,
        kind="mlp_speculator",
        num_heads=heads,
        num_layers=layers,
        lm_head=lm_head,
        rank=4,
        options=options,
    )
    made = SpeculatorHeads(config, whole, None, embedding).double()
    if trained:
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return made, whole


def published(heads, h, tokens, *, tied, scale_input):
    """The paper's recurrence, as it stands there, over tables and LM heads of the speculator's own."""
    width, steps = heads.heads[0].first.out_features, tokens.shape[-1]
    state_weight = 0.5 ** (0.5 / steps)
    emb_weight = math.sqrt((1 - state_weight**2) * (width / 2))

    def norm(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    state, logits = norm(h) / 2**0.5 if scale_input else h, []
    for i in range(steps):
        part = heads.heads[0 if tied else i]
        projected = state @ (part.first if i == 0 else part.later).weight.T
        summed = projected * state_weight + part.token.weight[tokens[..., i]] * emb_weight
        state = torch.nn.functional.gelu(norm(summed) * part.norm.weight + part.norm.bias)
        logits.append(state @ part.lm_head.weight.T + part.lm_head.bias)
    return torch.stack(logits)


@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_with_tables_and_lm_heads_of_its_own_it_is_the_published_speculator(tied, scale_input):
    heads, whole = make(lm_head="own", trained=True, tied=tied, scale_input=scale_input, own_embedding=True)
    h, tokens = 3 * torch.randn(2, 5, H, dtype=torch.float64), torch.randint(0, V, (2, 5, K))
    expected = whole.scale * published(heads, h, tokens, tied=tied, scale_input=scale_input)
    torch.testing.assert_close(heads(h, tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inner_size", [None, 6])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lm_head", ["shared", "low_rank"])
def test_a_fresh_head_prefers_no_token_to_another(lm_head, tied, inner_size):
    heads, whole = make(lm_head=lm_head, layers=2, tied=tied, inner_size=inner_size)
    h, tokens = torch.randn(2, 5, H, dtype=torch.float64), torch.randint(0, V, (2, 5, K))
    torch.testing.assert_close(heads(h, tokens), (whole.scale * whole.bias).expand(K, 2, 5, -1))


def test_states_begin_at_a_mean_square_of_half_with_h_and_tokens_in_balance():
    """What the published factors are for: sizes do not drift from head to head, whatever the target's scale."""
    torch.manual_seed(1)
    width = 256
    config = HeadsConfig(hidden_size=width, vocab_size=50, kind="mlp_speculator", num_heads=K)
    embedding = TokenEmbedding(weight=0.02 * torch.randn(50, width))
    heads = SpeculatorHeads(config, Projection(weight=torch.randn(50, width)), None, embedding).requires_grad_(False)
    state = heads.heads[0].first(scaled(40 * torch.randn(200, width), heads.options))
    vector = heads.heads[0].token(unit_scale(embedding(torch.arange(50))))
    kept = 0.5 ** (0.5 / K)
    assert float((kept * state).square().mean()) == pytest.approx(kept**2 / 2, rel=0.1)
    share = (kept * token_factor(config, heads.options) * vector).square().mean()
    assert float(share) == pytest.approx((1 - kept**2) / 2, rel=0.1)


@pytest.mark.parametrize("own_embedding", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_depends_on_the_tokens_before_its_own_and_on_no_others(tied, own_embedding):
    heads, _ = make(trained=True, tied=tied, own_embedding=own_embedding)
    h, tokens = torch.randn(H, dtype=torch.float64), torch.randint(0, V, (K,))
    before = heads(h, tokens)
    for changed in range(K):
        other = tokens.clone()
        other[changed] = (other[changed] + 1) % V
        after = heads(h, other)
        for k in range(K):
            assert torch.equal(after[k], before[k]) == (changed > k), (changed, k)


@pytest.mark.parametrize("own_embedding", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lm_head", LM_HEADS)
def test_gradients_reach_every_parameter_and_neither_projection_nor_embedding(lm_head, tied, own_embedding):
    heads, _ = make(trained=True, lm_head=lm_head, layers=2, tied=tied, own_embedding=own_embedding)
    heads(torch.randn(4, H, dtype=torch.float64), torch.randint(0, V, (4, K))).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in heads.parameters())
    assert not heads.projection.weight.requires_grad and not heads.embedding.weight.requires_grad
    assert not any("embedding" in name or "projection" in name for name in heads.state_dict())


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_share_no_storage_and_tied_heads_are_kept_once(tied):
    heads, _ = make(tied=tied, lm_head="own", own_embedding=True)
    state = heads.state_dict()
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(state)
    assert {name.split(".")[1] for name in state} == ({"0"} if tied else {"0", "1", "2"})


def test_no_scale_of_h_changes_a_guess_unless_asked_for():
    tokens, h = torch.randint(0, V, (K,)), torch.randn(H, dtype=torch.float64)
    heads, _ = make(trained=True)
    torch.testing.assert_close(heads(5 * h, tokens), heads(h, tokens), rtol=1e-4, atol=1e-5)
    heads, _ = make(trained=True, scale_input=False)
    assert not torch.allclose(heads(5 * h, tokens), heads(h, tokens), rtol=1e-2)


def test_one_tied_head_has_no_weights_that_it_never_uses():
    heads, _ = make(heads=1, tied=True)
    assert not any("later" in name for name in heads.state_dict())


def test_heads_without_tokens_are_an_error():
    heads, _ = make()
    with pytest.raises(ValueError, match="tokens must be given to mlp_speculator heads"):
        heads(torch.randn(H, dtype=torch.float64))


@pytest.mark.parametrize("inner_size", [None, 6, 12])
@pytest.mark.parametrize("tied", [False, True])
def test_lm_heads_may_read_the_state_of_any_width(tied, inner_size):
    heads, whole = make(lm_head="own", layers=2, tied=tied, inner_size=inner_size, direct=True, own_embedding=True)
    h, tokens = torch.randn(2, 5, H, dtype=torch.float64), torch.randint(0, V, (2, 5, K))
    assert heads.head(1).lm_head.in_features == (inner_size or H) and not hasattr(heads.head(1), "out")
    heads(h, tokens).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in heads.heads[0].lm_head.parameters())
    plain, _ = make(lm_head="own", trained=True, tied=tied, inner_size=inner_size, direct=True, own_embedding=True)
    expected = whole.scale * published(plain, h, tokens, tied=tied, scale_input=True)
    torch.testing.assert_close(plain(h, tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lm_head", ["shared", "low_rank"])
def test_the_targets_lm_head_cannot_read_the_state(lm_head):
    with pytest.raises(ValueError, match=f"direct must be False unless lm_head is 'own', got lm_head='{lm_head}'"):
        make(lm_head=lm_head, direct=True)
