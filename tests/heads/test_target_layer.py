"""A target's own layer class behind a joining product: it begins as the identity and sees what the view lets it."""

import copy

import pytest
import torch
from transformers import AutoConfig

from medusa_spec.heads.target_config import more_layers
from medusa_spec.heads.target_layer import TargetLayer
from medusa_spec.heads.view import UnrolledView
from medusa_spec.testing import ARCHITECTURES, COMMON

H = COMMON["hidden_size"]
NATIVE = {
    "deepseek_v3": {
        **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
        **{"moe_intermediate_size": 16, "num_key_value_heads": 4},
    },
    "mellum": {
        **{"head_dim": 8, "sliding_window": 3, "num_mtp_layers": 1},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    },
}
KNOWN = ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "mixtral", "gpt_oss", "deepseek_v3", "mellum"]


def decoder(name, **changes):
    own = {**ARCHITECTURES.get(name, {}), **NATIVE.get(name, {})}
    return more_layers(AutoConfig.for_model(name, **{**COMMON, **own, **changes}))


def moved(name):
    """A layer with every parameter off its start, in float64."""
    layer = TargetLayer(decoder(name)).double().requires_grad_(False)
    for parameter in layer.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)
    return layer


def states(rows):
    return torch.randn(1, rows, H, dtype=torch.float64), torch.randn(1, rows, H, dtype=torch.float64)


def run(layer, feature, vector, steps=1):
    """Some steps, each on the features of the one before and the same vectors."""
    view = UnrolledView(1, feature.shape[1], feature.device)
    for _ in range(steps):
        feature = layer(feature, vector, view.next())
    return feature


@pytest.mark.parametrize("name", KNOWN)
def test_a_fresh_layer_gives_the_features_norm(name):
    layer = TargetLayer(decoder(name)).double()
    feature, vector = states(7)
    expected = feature / feature.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(run(layer, feature, vector), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", KNOWN)
def test_a_fresh_layer_without_those_norms_gives_the_feature(name):
    layer = TargetLayer(decoder(name), normed=False).double()
    feature, vector = states(7)
    assert torch.equal(run(layer, feature, vector, steps=3), feature)
    assert not any("hnorm" in key or "post_norm" in key for key in layer.state_dict())


@pytest.mark.parametrize("name", KNOWN)
def test_a_row_sees_itself_and_the_rows_before_it(name):
    layer = moved(name)
    feature, vector = states(6)
    plain = run(layer, feature, vector)
    for changed in range(6):
        other = feature.clone()
        other[:, changed] += 1.0
        differs = (run(layer, other, vector) - plain).abs().amax((0, 2)) > 1e-9
        window = 3 if name == "mellum" else 6
        assert differs.tolist() == [changed <= row < changed + window for row in range(6)]


@pytest.mark.parametrize("name", KNOWN)
def test_in_a_later_step_a_row_sees_the_text_and_its_own_draft(name):
    layer = moved(name)
    feature, vector = states(5)
    plain = run(layer, feature, vector, steps=3)
    for row in range(5):
        alone = run(layer, feature[:, : row + 1], vector[:, : row + 1], steps=3)[:, row]
        torch.testing.assert_close(alone, plain[:, row], rtol=1e-5, atol=1e-5)  # some routers compute in float32


@pytest.mark.parametrize("name", KNOWN)
def test_training_mode_changes_nothing_and_a_cast_spoils_no_positions(name):
    layer = moved(name)
    feature, vector = states(5)
    expected = run(layer, feature, vector)
    assert torch.equal(run(layer.train(), feature, vector), expected)
    assert not any(module.training for module in layer.modules())
    frequencies = layer.positions[0].inv_freq.clone() if hasattr(layer.positions[0], "inv_freq") else None
    there_and_back = copy.deepcopy(layer).bfloat16().double()
    if frequencies is not None:
        assert torch.equal(there_and_back.positions[0].inv_freq, frequencies)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt2", "GPT2Model has no .*EAGLE"),
        ("gpt_neox", "GPTNeoXLayer must hand its keys and values to the cache .*EAGLE"),
        ("mamba", "has no (list|rotary|norm).*EAGLE|cannot be"),
    ],
)
def test_layers_of_another_form_are_refused_by_what_is_missing(name, words):
    with pytest.raises(ValueError, match=words):
        TargetLayer(decoder(name))


def test_a_recurrent_layer_is_refused():
    values = decoder("qwen3_next", layer_types=["linear_attention", "full_attention"], head_dim=8)
    values["layer_types"] = ["linear_attention"]
    with pytest.raises(ValueError, match="'linear_attention' cannot be an MTP layer: it must attend"):
        TargetLayer(values)


def test_two_layers_begin_with_weights_of_their_own():
    first, second = TargetLayer(decoder("mixtral")), TargetLayer(decoder("mixtral"))
    experts = [dict(layer.named_parameters())["mtp.mtp_block.mlp.experts.gate_up_proj"] for layer in (first, second)]
    assert not torch.equal(*experts) and all(0.01 < expert.detach().std() < 0.03 for expert in experts)


def test_adopted_weights_are_those_of_the_layer_given():
    given = moved("deepseek_v3")
    with torch.device("meta"):
        empty = TargetLayer(decoder("deepseek_v3"))
    empty.adopt(given.mtp)
    feature, vector = states(4)
    assert torch.equal(run(empty, feature, vector), run(given, feature, vector))
    with pytest.raises(RuntimeError, match="size mismatch|Missing"):
        empty.adopt(moved("llama").mtp)
