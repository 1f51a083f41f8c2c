"""Fused heads begin as the target's own LM head and add up feature, token and tapped layers."""

import pytest
import torch

from medusa_spec.heads.config import LM_HEADS
from medusa_spec.heads.view import UnrolledView

H, V, K, EPS = 8, 20, 3, 1e-5


def unit(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def random_text(taps):
    h, tokens = torch.randn(2, 5, H, dtype=torch.float64), torch.randint(0, V, (2, 5, K))
    return h, tokens, torch.randn(2, 5, taps, H, dtype=torch.float64) if taps else None


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lm_head", LM_HEADS)
@pytest.mark.parametrize("taps", ["", "1", "0,3"])
def test_every_fresh_head_is_the_targets_lm_head(make, lm_head, tied, taps):
    heads, whole = make("fused", lm_head=lm_head, taps=taps, tied=tied)
    h, tokens, layers = random_text(len(heads.taps))
    found = heads(h, tokens, layers=layers)
    torch.testing.assert_close(found, whole(h).expand(K, -1, -1, -1), rtol=1e-6, atol=1e-6)
    assert heads.mimics and heads.attends and heads.sequential


def test_feature_token_and_taps_are_added_up_before_the_layer(make):
    heads, _ = make("fused", trained=True, taps="0,2")
    head, (h, tokens, layers) = heads.head(0), random_text(2)
    feature = h + unit(layers, 1e-6).flatten(-2) @ head.fuse.weight.T
    vectors = heads.embedding(tokens[..., 0])
    joined = torch.cat([unit(vectors, EPS) * head.token_norm.weight, unit(feature, EPS) * head.feature_norm.weight], -1)
    x = feature + joined @ head.join.weight.T
    out = head.layer(x, unit(x, EPS) * head.input_layernorm.weight, UnrolledView(2, 5, h.device).next())
    torch.testing.assert_close(heads.features(h, tokens, layers)[0], out)


def test_layers_must_be_given_where_some_are_tapped(make):
    h, tokens, _ = random_text(0)
    with pytest.raises(ValueError, match="layers must be given to fused heads that tap some, got none"):
        make("fused", taps="0,1")[0].features(h, tokens)


def test_only_the_first_step_fuses_taps(make):
    untied, tied, without = (make("fused", **o)[0] for o in ({"taps": "0,1", "tied": False}, {"taps": "0,1"}, {}))
    fusing = [[name for name in heads.state_dict() if "fuse" in name] for heads in (untied, tied, without)]
    assert fusing == [["heads.0.fuse.weight"], ["heads.0.fuse.weight"], []]
