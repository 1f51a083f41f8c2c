"""A small random copy of a model's architecture, for probing. Knows size attributes of configs, no weights."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

SIZES: dict[str, int] = {
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "intermediate_size": 48,
    "n_inner": 48,
    "ffn_dim": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_attention_heads": 4,
    "n_head": 4,
    "head_dim": 8,
    "vocab_size": 96,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
}
"""Attributes that configs use for sizes, and the twin's values."""

WINDOW = 8


def shrink(config: Any) -> Any:
    """A copy of a text config with two layers (or one of each kind), narrow, and a window of `WINDOW` tokens."""
    small = copy.deepcopy(config)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or []))
    layers = max(2, len(kinds))
    for name in ("num_hidden_layers", "n_layer"):
        if hasattr(small, name):
            setattr(small, name, layers)
    if kinds:
        small.layer_types = (kinds * layers)[:layers]
    for name, size in SIZES.items():
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, size)
    heads = getattr(config, "num_attention_heads", 1)
    if isinstance(getattr(small, "num_key_value_heads", None), int):
        small.num_key_value_heads = 4 if config.num_key_value_heads == heads else 2
    if getattr(small, "sliding_window", None):
        small.sliding_window = WINDOW
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(small, name, None) is not None:
            setattr(small, name, 0)
    return small


def twin(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """A float64 twin of `model` with random weights, every parameter moved off its initial value.

    Args:
        model: A causal LM whose text config can be shrunk.
        attention: Attention implementation of the twin.
    """
    config = shrink(model.config.get_text_config(decoder=True))
    config._attn_implementation = attention
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = type(model)(config).eval()
        small.to(dtype=torch.float64, device="cpu")
        with torch.no_grad():
            for parameter in small.parameters():  # zeros and ones would hide what they multiply
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return small
