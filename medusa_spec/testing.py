"""Tiny random models with a byte-level chat tokenizer, for tests here and elsewhere."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from medusa_spec.errors import ConfigError

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
ALTERNATING = ["sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 8, "head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "attn_implementation": "eager"},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": ALTERNATING},
    "gpt2": {},
    "gpt_neox": {},
    "phi3": {},
    "mixtral": MIXTURE,
    "gpt_oss": {**MIXTURE, "head_dim": 8, "sliding_window": 8, "layer_types": ALTERNATING, "rope_parameters": YARN},
}
"""What differs from `COMMON`, by `model_type`: windows, soft-caps, sinks, mixtures, learnt and rotary positions."""


def tiny(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any) -> PreTrainedModel:
    """A random model of two layers, hidden size 32, V 128, of one of `ARCHITECTURES`; public, for your tests too.

    Every parameter is moved off its initial value: zeros and ones would hide what they multiply, and small weights
    would hide a wrong mask. Eager mixtures of experts give each row the same result in any batch.

    Args:
        name: `model_type` of the architecture, a key of `ARCHITECTURES`.
        seed: Of the weights; the global random state is left alone.
        dtype: float64 by default: no rounding can then tip a choice between two tokens.
        **overrides: Attributes of the config.

    Raises:
        ConfigError: If the architecture is not among them.
    """
    if name not in ARCHITECTURES:
        raise ConfigError(f"name must be one of {', '.join(ARCHITECTURES)}, got {name!r}")
    config = AutoConfig.for_model(name, **{**COMMON, **ARCHITECTURES[name], **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte, and the three special tokens of its chat template: V is 259."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: place for place, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([START, END, PAD])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(*, seed: int = 0, dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    """A random Llama of two layers, hidden size 32, for `tiny_tokenizer`.

    float64 by default: no rounding can then tip a choice between two tokens.
    """
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        # Larger than usual, so that choices are far apart and depend on the context.
        initializer_range=0.2,
        bos_token_id=int(str(tokenizer.convert_tokens_to_ids(START))),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    model.to(dtype=dtype)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def save_tiny_model(folder: str | Path, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Path:
    """Model and tokenizer in a folder that `from_pretrained` takes."""
    tiny_model(seed=seed, dtype=dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return Path(folder)
