"""One more layer of any target: its config as plain values, and back."""

import json

import pytest
from transformers import AutoConfig

from medusa_spec.heads.target_config import config_of, more_layers
from medusa_spec.testing import ARCHITECTURES, COMMON


def config(name, **changes):
    return AutoConfig.for_model(name, **{**COMMON, **ARCHITECTURES.get(name, {}), **changes})


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_shape_of_a_layer_survives_json(name):
    target = config(name)
    values = more_layers(target)
    found = config_of(json.loads(json.dumps(values)))
    assert type(found) is type(target) and found.num_hidden_layers == 1
    for key in set(values) - {"num_hidden_layers", "n_layer", "layer_types"}:
        assert getattr(found, key) == getattr(target, key), key
    assert values == more_layers(found)


def test_what_is_beside_the_shape_is_forgotten_and_the_target_left_alone():
    target = config("llama", architectures=["X"], dtype="bfloat16", name_or_path="somewhere")
    before = target.to_dict()
    target._attn_implementation = "eager"
    assert more_layers(target) == more_layers(config("llama"))
    assert target.to_dict() == before


def test_a_layer_is_like_the_last_that_sees_the_whole_text():
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    target = config(
        "smollm3", num_hidden_layers=4, layer_types=kinds, no_rope_layers=[1, 1, 0, 1], eos_token_id=[2] * 4
    )
    values = more_layers(target)
    assert values["layer_types"] == ["full_attention"] and values["no_rope_layers"] == [0]
    assert values["eos_token_id"] == [2] * 4


def test_where_all_layers_have_windows_the_new_one_has_none():
    values = more_layers(config("gemma3_text", layer_types=["sliding_attention"] * 2))
    assert values["layer_types"] == ["full_attention"]


def test_a_target_with_mtp_layers_says_itself_what_they_are():
    target = AutoConfig.for_model("mellum", **{**COMMON, "sliding_window": 8, "num_mtp_layers": 1})
    assert more_layers(target)["layer_types"] == ["sliding_attention"]
    deep = AutoConfig.for_model("deepseek_v3", **{**COMMON, "num_mtp_layers": 3})
    assert more_layers(deep)["num_hidden_layers"] == 3 and more_layers(deep)["first_k_dense_replace"] == 0


@pytest.mark.parametrize("values", [{"model_type": "no_such"}, {"hidden_size": 8}])
def test_a_model_that_transformers_does_not_know_is_refused_by_name(values):
    with pytest.raises(ValueError, match=f"decoder must be .* got model_type {values.get('model_type')!r}"):
        config_of(values)
