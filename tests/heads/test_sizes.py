"""Sizes of a layer follow the target, and what cannot be is named."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, LlamaConfig, Qwen3Config

from medusa_spec.heads.sizes import LayerSizes, sizes_of


@pytest.mark.parametrize(
    "name", [name for name in LayerSizes.__dataclass_fields__ if name not in ("rope_scaling", "qkv_bias")]
)
@pytest.mark.parametrize("value", [0, -2])
def test_a_size_must_be_above_zero(name, value):
    with pytest.raises(ValueError, match=f"{name} must be above 0, or None, got {value}"):
        LayerSizes(**{name: value})


def test_query_heads_share_key_heads_evenly():
    with pytest.raises(ValueError, match="num_attention_heads must be a multiple of num_key_value_heads 3, got 4"):
        LayerSizes(num_attention_heads=4, num_key_value_heads=3)
    with pytest.raises(ValueError, match="multiple of num_key_value_heads 3, got 2"):
        LayerSizes(num_key_value_heads=3).filled(128)  # two query heads, by H alone


def test_rotated_heads_are_even():
    with pytest.raises(ValueError, match="head_dim must be even, .* got 7"):
        LayerSizes(head_dim=7)


@given(st.integers(1, 5000), st.sampled_from([None, 1, 2, 6]), st.sampled_from([None, 2, 10]))
def test_filled_sizes_fit_each_other_and_keep_what_was_said(hidden, heads, dim):
    found = LayerSizes(num_attention_heads=heads, head_dim=dim).filled(hidden)
    assert None not in vars(found).values()
    assert found.num_attention_heads == heads or heads is None
    assert found.head_dim == dim or dim is None
    assert found.num_attention_heads % found.num_key_value_heads == 0 and found.head_dim % 2 == 0
    assert 8 * hidden / 3 <= found.intermediate_size < 8 * hidden / 3 + 32 and found.intermediate_size % 32 == 0
    if heads is dim is None and hidden % 64 == 0:
        assert found.num_attention_heads * found.head_dim == hidden
    assert found.filled(hidden) == found


SHAPE = {"hidden_size": 96, "intermediate_size": 112, "num_attention_heads": 6}
ROPE = {"rope_theta": 5e5, "rope_type": "default"}
OF_SHAPE = {"num_attention_heads": 6, "intermediate_size": 112}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            LlamaConfig(**SHAPE, num_key_value_heads=2, rms_norm_eps=1e-4, rope_parameters=ROPE),
            {**OF_SHAPE, "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 5e5, "rms_norm_eps": 1e-4},
        ),
        (
            Qwen3Config(**SHAPE, num_key_value_heads=3, head_dim=32),
            {**OF_SHAPE, "num_key_value_heads": 3, "head_dim": 32, "rms_norm_eps": 1e-6},
        ),
        (GPT2Config(n_embd=96, n_head=6), {"num_attention_heads": 6}),
        (SimpleNamespace(), {}),
        (None, {}),
        (SimpleNamespace(num_attention_heads=6, num_key_value_heads=4), {"num_attention_heads": 6}),
        (SimpleNamespace(num_attention_heads=0, head_dim="x", rms_norm_eps=-1.0), {}),
        (SimpleNamespace(num_attention_heads=[6, 6], intermediate_size=None), {}),
        (SimpleNamespace(head_dim=7), {}),
    ],
    ids=["llama", "qwen3", "gpt2", "empty", "none", "uneven", "wrong", "per layer", "odd"],
)
def test_what_a_target_says_is_followed_and_the_rest_left_out(config, expected):
    found = sizes_of(config)
    assert {name: value for name, value in found.items() if name != "rope_theta" or name in expected} == expected
    LayerSizes(**found)  # each can be


def test_what_a_target_says_has_the_types_that_options_take():
    config = SimpleNamespace(rms_norm_eps=1, rope_parameters={"rope_theta": 10_000}, head_dim=8, intermediate_size=9)
    assert len(sizes_of(config)) == 4
    for name, value in sizes_of(config).items():
        assert type(value) is (float if name in ("rope_theta", "rms_norm_eps") else int)
