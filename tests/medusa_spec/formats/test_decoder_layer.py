"""Sizes of a published layer come from its tensors, and what it leaves unsaid from what Llama leaves unsaid."""

import warnings

import pytest

from medusa_spec.errors import CheckpointError, UnsupportedError
from medusa_spec.formats.decoder_layer import BIASES, NAMES, layer_config, layer_names, layer_options, refuse_variants

SHAPES = {
    "self_attn.q_proj.weight": (32, 64),
    "self_attn.k_proj.weight": (16, 64),
    "self_attn.v_proj.weight": (16, 64),
    "self_attn.o_proj.weight": (32, 32),
    "mlp.gate_proj.weight": (40, 32),
    "mlp.up_proj.weight": (40, 32),
    "mlp.down_proj.weight": (32, 40),
    "post_attention_layernorm.weight": (32,),
}


def options(contents):
    return layer_options(contents, "F", SHAPES, "")


def test_the_shapes_are_believed(names):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = options(names(*NAMES, num_attention_heads=4, num_key_value_heads=2, intermediate_size=40))
    assert found == {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 40,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "rope_scaling": "",
        "qkv_bias": False,
    }
    with pytest.warns(UserWarning, match="num_key_value_heads = 4, the tensors are those of 2"):
        options(names(*NAMES, num_attention_heads=4, num_key_value_heads=4))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 500_000, "rope_scaling": None},
    ],
)
def test_the_base_of_positions_stands_where_llama_configs_of_any_time_have_it(rope, names):
    assert options(names(*NAMES, num_attention_heads=4, **rope))["rope_theta"] == 5e5


def test_a_nested_config_describes_the_layer(names):
    contents = names(*NAMES, transformer_layer_config={"num_attention_heads": 2, "rms_norm_eps": 1e-3}, rms_norm_eps=9)
    assert layer_config(contents)["num_attention_heads"] == 2
    assert (options(contents)["head_dim"], options(contents)["rms_norm_eps"]) == (16, 1e-3)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 131072}


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, "linear:2.5"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, "llama3:8.0,1.0,4.0,131072.0"),
    ],
)
def test_stretched_positions_are_an_option(rope, scaling, names):
    assert options(names(*NAMES, num_attention_heads=4, **rope))["rope_scaling"] == scaling


def test_stretched_positions_without_their_numbers_are_refused(names):
    with pytest.raises(CheckpointError, match="must say low_freq_factor, a number above 0, got None"):
        options(names(*NAMES, num_attention_heads=4, rope_scaling={"rope_type": "llama3", "factor": 8.0}))


def test_biases_are_expected_where_one_is_or_the_config_says_so(names):
    assert set(layer_names(names(), "p.", ["p." + BIASES[1]]).values()) == {f"p.{name}" for name in (*NAMES, *BIASES)}
    assert layer_names(names(qkv_bias=True), "", [])["heads.0.layer.self_attn.v_proj.bias"] == BIASES[2]
    assert set(layer_names(names(attention_bias=True), "", []).values()) == set(NAMES)


@pytest.mark.parametrize("heads", [None, 0, True, 4.0, "4"])
def test_heads_must_be_a_number(heads, names):
    with pytest.raises(CheckpointError, match="must say num_attention_heads, a number above 0, got"):
        options(names(*NAMES, num_attention_heads=heads))


def test_what_our_layer_does_not_compute_is_refused(names):
    refuse_variants(names(hidden_act="silu", rope_scaling={"rope_type": "default"}), "F", [*NAMES, "fc.weight"])
    with pytest.raises(UnsupportedError, match=r"F heads with own things \(own\.weight\), which is not supported yet"):
        refuse_variants(names(), "F", [*NAMES, "own.weight"], ((r"own\..*", "own things"),))
