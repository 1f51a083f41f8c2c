"""EAGLE-1 heads begin as the target's own LM head and join token and feature."""

import pytest
import torch

from medusa_spec.heads.config import LM_HEADS
from medusa_spec.heads.view import UnrolledView

H, V, K = 8, 20, 3


def test_the_family_mimics_the_targets_features(make):
    heads, _ = make("eagle")
    assert heads.mimics and heads.attends and heads.sequential and heads.taps == ()


@pytest.mark.parametrize("options", [{}, {"tied": False}, {"bias": True}], ids=str)
@pytest.mark.parametrize("lm_head", LM_HEADS)
def test_every_fresh_head_is_the_targets_lm_head(make, lm_head, options):
    heads, whole = make("eagle", lm_head=lm_head, **options)
    h, tokens = torch.randn(2, 5, H, dtype=torch.float64), torch.randint(0, V, (2, 5, K))
    torch.testing.assert_close(heads(h, tokens), whole(h).expand(K, -1, -1, -1), rtol=1e-6, atol=1e-6)


def test_token_and_feature_are_joined_in_this_order(make):
    """The layer reads W [e(token), feature] without a norm, and its residual stream is the same."""
    heads, _ = make("eagle", trained=True, bias=True)
    head, tokens = heads.head(0), torch.randint(0, V, (1, 4, K))
    h = torch.randn(1, 4, H, dtype=torch.float64)
    x = heads.embedding(tokens[..., 0]) @ head.fc.weight[:, :H].T + h @ head.fc.weight[:, H:].T + head.fc.bias
    view = UnrolledView(1, 4, h.device).next()
    torch.testing.assert_close(heads.features(h, tokens)[0], head.layer(x, x, view))


def test_a_bias_is_there_when_it_is_asked_for(make):
    assert make("eagle")[0].head(0).fc.bias is None
    assert not make("eagle", bias=True)[0].head(0).fc.bias.any()


def test_state_holds_the_layer_and_the_joining_product_and_tied_ones_once(make):
    names = {
        "fc.weight", "layer.post_attention_layernorm.weight",
        *(f"layer.self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"layer.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }  # fmt: skip
    assert set(make("eagle")[0].state_dict()) == {f"heads.0.{name}" for name in names}
    untied = make("eagle", tied=False)[0]
    assert set(untied.state_dict()) == {f"heads.{k}.{name}" for k in range(K) for name in names}
