"""Positions turn as those of the models that they are made after."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from medusa_spec.heads.rotary import parse_scaling, rates_of

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
SCALINGS = {
    "": {"rope_type": "default"},
    "linear:4": {"rope_type": "linear", "factor": 4.0},
    "llama3:8,1,4,512": {"rope_type": "llama3", **LLAMA3},
    "llama3:32,1.5,3.5,8192": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 3.5,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.mark.parametrize("scaling", list(SCALINGS))
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_rates_are_those_of_transformers(theta, scaling):
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=8192,
        rope_parameters={"rope_theta": theta, **SCALINGS[scaling]},
    )
    expected = LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(rates_of(64, theta, scaling).float(), expected, rtol=1e-5, atol=0.0)


def test_scalings_are_read_as_they_are_written():
    assert parse_scaling("linear:4") == ("linear", (4.0,))
    assert parse_scaling("llama3:8,1,4,8192") == ("llama3", (8.0, 1.0, 4.0, 8192.0))


@pytest.mark.parametrize("text", ["yarn:8", "linear", "linear:", "linear:0", "linear:a", "linear:2,3", "llama3:8,1,4"])
def test_other_scalings_are_refused(text):
    with pytest.raises(ValueError, match=f"rope_scaling must be 'linear:factor' or .* got '{text}'"):
        parse_scaling(text)


def test_frequencies_that_do_not_rise_are_refused():
    with pytest.raises(ValueError, match="low_freq_factor below high_freq_factor"):
        parse_scaling("llama3:8,4,4,8192")
