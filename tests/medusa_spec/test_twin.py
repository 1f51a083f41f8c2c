import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_spec.testing import ARCHITECTURES, tiny
from medusa_spec.twin import SIZES, WINDOW, shrink, twin

IDS = torch.arange(1, 21)[None]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_config_of_full_size_shrinks_to_a_model_that_runs(name: str) -> None:
    config = AutoConfig.for_model(name)
    before = copy.deepcopy(config.to_dict())
    small = shrink(config)
    assert config.to_dict() == before
    assert small.num_hidden_layers == 2 and small.vocab_size == SIZES["vocab_size"]
    model = AutoModelForCausalLM.from_config(small)
    assert sum(parameter.numel() for parameter in model.parameters()) < 100_000
    with torch.no_grad():
        assert model(IDS).logits.isfinite().all()


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gpt_oss"])
def test_every_kind_of_layer_is_kept_and_windows_are_small(name: str) -> None:
    config = AutoConfig.for_model(name)
    small = shrink(config)
    assert set(small.layer_types) == set(config.layer_types)
    assert len(small.layer_types) == small.num_hidden_layers
    assert small.sliding_window == WINDOW


@pytest.mark.parametrize(("kv_heads", "expected"), [(32, 4), (8, 2), (1, 2)])
def test_grouped_heads_stay_grouped(kv_heads: int, expected: int) -> None:
    config = AutoConfig.for_model("llama", num_attention_heads=32, num_key_value_heads=kv_heads)
    assert shrink(config).num_key_value_heads == expected


def test_a_model_without_a_window_gets_none() -> None:
    assert not getattr(shrink(AutoConfig.for_model("llama")), "sliding_window", None)
    assert shrink(AutoConfig.for_model("mistral", sliding_window=None)).sliding_window is None


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_twin_is_a_float64_model_of_the_same_class(name: str) -> None:
    model = tiny(name, num_hidden_layers=4) if "layer_types" not in ARCHITECTURES[name] else tiny(name)
    small = twin(model, model.config._attn_implementation)
    assert type(small) is type(model) and small.dtype == torch.float64 and not small.training
    assert small.config._attn_implementation == model.config._attn_implementation
    with torch.no_grad():
        assert small(IDS).logits.isfinite().all()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_parameter_of_a_twin_keeps_a_value_that_hides_what_it_multiplies(name: str) -> None:
    model = tiny(name)
    for key, parameter in twin(model, model.config._attn_implementation).named_parameters():
        assert not ((parameter == 0) | (parameter == 1)).any(), key


def test_twins_are_equal_and_leave_the_random_state_alone() -> None:
    model = tiny("llama")
    state = torch.get_rng_state()
    one, other = twin(model, "sdpa"), twin(model, "sdpa")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mamba2", {}),
        ("bamba", {"attn_layer_indices": [3], "num_hidden_layers": 6}),
        ("jamba", {}),
        ("falcon", {}),
        ("bloom", {}),
        ("rwkv", {}),
        ("gemma3n_text", {}),
        ("gemma4_text", {"num_kv_shared_layers": 20}),
        ("llama4_text", {}),
        ("deepseek_v3", {}),
        ("qwen3_5_text", {}),
    ],
)
def test_other_layers_shrink_to_a_model_that_decodes_past_the_window(name: str, settings: dict) -> None:
    config = AutoConfig.for_model(name, **settings)
    small = shrink(config)
    small._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(small)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert set(small.layer_types if hasattr(small, "layer_types") else ()) == set(getattr(config, "layer_types", ()))
    with torch.no_grad():
        assert model(IDS % 90).logits.isfinite().all()
