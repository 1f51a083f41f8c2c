"""EAGLE-3 heads begin as the target's own LM head, or as published by what it reads in the mean of tapped layers."""

import pytest
import torch

from medusa_spec.heads.config import LM_HEADS
from medusa_spec.heads.eagle3 import Eagle3Options
from medusa_spec.heads.sizes import usual_taps
from medusa_spec.heads.view import UnrolledView

H, V, K, EPS = 8, 20, 3, 1e-5


def unit(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def random_text(taps=2):
    h, tokens = torch.randn(2, 5, H, dtype=torch.float64), torch.randint(0, V, (2, 5, K))
    scales = 10.0 ** torch.arange(taps, dtype=torch.float64)[:, None]
    return h, tokens, torch.randn(2, 5, taps, H, dtype=torch.float64) * scales


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lm_head", LM_HEADS)
@pytest.mark.parametrize("taps", ["", "1", "0,3"])
def test_every_fresh_head_is_the_targets_lm_head(make, lm_head, tied, taps):
    heads, whole = make("eagle3", lm_head=lm_head, taps=taps, tied=tied)
    h, tokens, layers = random_text(len(heads.taps))
    found = heads(h, tokens, layers=layers if taps else None)
    torch.testing.assert_close(found, whole(h).expand(K, -1, -1, -1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lm_head", LM_HEADS)
@pytest.mark.parametrize("taps", ["1", "0,3", "0,1,5"])
def test_every_fresh_head_as_published_guesses_by_the_mean_of_the_taps(make, lm_head, tied, taps):
    heads, whole = make("eagle3", lm_head=lm_head, taps=taps, tied=tied, from_h=False)
    h, tokens, layers = random_text(1 + taps.count(","))
    found = heads(h, tokens, layers=layers)
    expected = whole(unit(layers.mean(-2), EPS))
    torch.testing.assert_close(found, expected.expand(K, -1, -1, -1), rtol=1e-6, atol=1e-6)


def test_without_taps_h_stands_for_them(make):
    heads, whole = make("eagle3", from_h=False)
    h, tokens, _ = random_text()
    assert heads.taps == () and not heads.mimics
    expected = whole(unit(h, EPS)).expand(K, -1, -1, -1)
    torch.testing.assert_close(heads(h, tokens), expected, rtol=1e-6, atol=1e-6)


def test_a_head_with_taps_as_published_does_not_read_h(make):
    heads, _ = make("eagle3", trained=True, taps="0,1", from_h=False)
    h, tokens, layers = random_text()
    assert torch.equal(heads(h, tokens, layers=layers), heads(h + 1, tokens, layers=layers))


@pytest.mark.parametrize("from_h", [False, True])
def test_the_layer_reads_norms_of_token_and_feature_and_its_stream_is_the_feature(make, from_h):
    heads, _ = make("eagle3", trained=True, taps="0,1", from_h=from_h)
    head, (h, tokens, layers) = heads.head(0), random_text()
    read = (unit(layers, 1e-6) if from_h else layers).flatten(-2) @ head.fc.weight.T
    feature = h + read if from_h else read
    vectors = heads.embedding(tokens[..., 0])
    entered = torch.cat(
        [unit(vectors, EPS) * head.input_layernorm.weight, unit(feature, EPS) * head.hidden_norm.weight], -1
    )
    out = head.layer(feature, entered, UnrolledView(2, 5, h.device).next())
    expected = out if from_h else unit(out, EPS) * head.norm.weight
    torch.testing.assert_close(heads.features(h, tokens, layers)[0], expected)


def test_layers_must_be_given_where_some_are_tapped(make):
    h, tokens, _ = random_text()
    with pytest.raises(ValueError, match="layers must be given to EAGLE-3 heads that tap some, got none"):
        make("eagle3", taps="0,1")[0].features(h, tokens)


@pytest.mark.parametrize("taps", ["2,x", "1,,2", ",", "1.5", "a", "-1", "2,1", "1,1"])
def test_taps_that_cannot_be_are_refused(taps):
    with pytest.raises(ValueError, match=f"taps must be .* got '{taps}'"):
        Eagle3Options(taps=taps)


@pytest.mark.parametrize(
    ("taps", "layers"), [("", ()), ("3", (3,)), (3, (3,)), (0, (0,)), ("2,15,27", (2, 15, 27)), ("0, 4", (0, 4))]
)
def test_taps_are_layers_by_number(make, taps, layers):
    assert Eagle3Options(taps=taps).layers == make("eagle3", taps=taps)[0].taps == layers


def test_one_tap_is_the_same_as_text_and_as_number():
    assert Eagle3Options(taps=3) == Eagle3Options(taps="3") != Eagle3Options(taps="4")


@pytest.mark.parametrize("layers", range(1, 40))
def test_the_usual_taps_are_layers_of_the_target_and_rise(layers):
    found = Eagle3Options(taps=usual_taps(layers)).layers
    assert found == tuple(sorted(set(found))) and set(found) <= set(range(layers)) and found


def test_the_usual_taps_are_the_published_ones():
    assert usual_taps(32) == "2,16,29" and usual_taps(4) == "1,2"


def test_only_the_first_step_joins_taps(make):
    """Later steps begin with the feature of the one before: weights that nothing reads would be saved for nothing."""
    untied, tied = (make("eagle3", taps="0,1", tied=tied)[0] for tied in (False, True))
    joining = [name for name in untied.state_dict() if name.endswith("fc.weight")]
    assert joining == ["heads.0.fc.weight"] == [name for name in tied.state_dict() if name.endswith("fc.weight")]
