"""MTP heads begin as the target's LM head on norm(h), hand features on, and train in every part."""

import pytest
import torch
from transformers import AutoConfig

from medusa_spec.heads import HeadsConfig, Projection, TokenEmbedding, fitted_options, make_heads
from medusa_spec.testing import ARCHITECTURES, COMMON

H, V, K = 32, 128, 3
TARGETS = ["llama", "qwen3", "mistral", "gemma2", "mixtral"]


def target(name):
    return AutoConfig.for_model(name, **{**COMMON, **ARCHITECTURES[name]})


def make(name="llama", moved=False, **options):
    config = HeadsConfig(
        hidden_size=H, vocab_size=V, kind="mtp", num_heads=K, options=fitted_options("mtp", options, target(name))
    )
    whole = Projection(weight=torch.randn(V, H).double())
    heads = make_heads(config, whole, None, TokenEmbedding(weight=torch.randn(V, H).double())).double()
    if moved:
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return heads


def texts(rows=6, batch=2):
    return torch.randn(batch, rows, H).double(), torch.randint(0, V, (batch, rows, K))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", TARGETS)
def test_every_fresh_head_is_the_targets_lm_head(name, tied):
    heads = make(name, tied=tied)
    h, tokens = texts()
    torch.testing.assert_close(heads(h, tokens), heads.projection(h).expand(K, -1, -1, -1))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", TARGETS)
def test_as_published_a_fresh_head_ranks_tokens_as_the_targets_lm_head_does_for_the_norm_of_h(name, tied):
    heads = make(name, tied=tied, from_h=False)
    h, tokens = texts()
    expected = heads.projection(h / h.square().mean(-1, keepdim=True).sqrt())
    logits = heads(h, tokens)
    for k in range(K):
        torch.testing.assert_close(logits[k], expected, rtol=1e-3, atol=1e-3)
        assert torch.equal(logits[k].argsort(-1), heads.projection(h).argsort(-1))


@pytest.mark.parametrize("from_h", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_gradients_reach_every_parameter(name, tied, from_h):
    heads = make(name, moved=True, tied=tied, from_h=from_h)
    h, tokens = texts()
    sum(feature.square().sum() for feature in heads.features(h, tokens)).backward()
    assert [key for key, parameter in heads.named_parameters() if parameter.grad is None] == []
    assert [key for key, parameter in heads.named_parameters() if not parameter.grad.any()] == []


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_depends_on_the_tokens_before_its_guess_and_on_no_later_one(tied):
    heads = make(moved=True, tied=tied)
    h, tokens = texts(rows=1, batch=1)
    plain = heads.features(h, tokens)
    for changed in range(K):
        other = tokens.clone()
        other[..., changed] = (other[..., changed] + 1) % V
        same = [torch.equal(one, two) for one, two in zip(heads.features(h, other), plain, strict=True)]
        assert same == [k < changed for k in range(K)]


def test_tied_steps_are_one_layer_and_others_one_each():
    assert len(make(tied=True).heads) == 1 and len(make(tied=False).heads) == K
    heads = make(tied=False)
    assert heads.head(0).layer.mtp.mtp_block is not heads.head(1).layer.mtp.mtp_block


def test_the_layer_is_of_the_targets_own_class():
    names = {name: type(make(name).head(0).layer.mtp.mtp_block).__name__ for name in TARGETS}
    assert names["llama"] == "LlamaDecoderLayer" and names["mixtral"] == "MixtralDecoderLayer"
    assert names["gemma2"] == "Gemma2DecoderLayer" and len(set(names.values())) == len(TARGETS)


def test_a_layer_of_another_width_is_refused_with_both_numbers():
    options = fitted_options("mtp", {}, target("llama"))
    config = HeadsConfig(hidden_size=48, vocab_size=V, kind="mtp", num_heads=K, options=options)
    with pytest.raises(ValueError, match="decoder must have hidden_size = 48, that of the heads, got 32"):
        make_heads(config, Projection(weight=torch.randn(V, 48)), None, TokenEmbedding(weight=torch.randn(V, 48)))


def test_without_a_target_the_layer_is_a_llama_layer():
    config = HeadsConfig(hidden_size=8, vocab_size=V, kind="mtp", num_heads=2)
    heads = make_heads(config, Projection(weight=torch.randn(V, 8)), None, TokenEmbedding(weight=torch.randn(V, 8)))
    assert type(heads.head(0).layer.mtp.mtp_block).__name__ == "LlamaDecoderLayer"
    assert heads(torch.randn(1, 3, 8), torch.randint(0, V, (1, 3, 2))).shape == (2, 1, 3, V)
