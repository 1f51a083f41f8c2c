"""A small random copy of a model's architecture, for probing. Knows size attributes of configs, no weights."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

WINDOW = 8

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "embedding_dim"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "attention_hidden_size", "input_embedding_size", "lru_width"), 32),
    **dict.fromkeys(("output_embedding_size",), 40),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff", "dim_ff", "d_inner"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "intermediate_size_mlp", "dense_intermediate_size"), 48),
    **dict.fromkeys(("shared_intermediate_size", "feed_forward_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_experts_intermediate_size",), 16),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "d_head", "dim_head", "attention_head_size"), 8),
    **dict.fromkeys(("attention_head_dim", "rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("query_pre_attn_scalar", "index_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(
        ("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim", "mamba_headdim"), 8
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "num_decoder_layers", "num_layers_per_stack"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("lora_rank", "o_lora_rank", "time_step_rank", "mamba_dt_rank", "gated_norm_rank"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "adapter_rank", "router_hidden_size"), 8),
    **dict.fromkeys(("ple_embed_dim", "hc_lowrank", "d_rel", "loop_gate_rank"), 8),
    **dict.fromkeys(("index_n_heads", "linear_num_key_heads", "linear_num_heads", "o_groups", "mamba_n_groups"), 2),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("index_topk",), 6),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), 96),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), WINDOW),
    **dict.fromkeys(("attention_chunk_size", "local_attention", "keep_window_size"), WINDOW),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "mamba_chunk_len"), 4),
}
"""Attributes that configs use for sizes, and the twin's values."""


MIXERS = (
    ("num_heads", "head_dim", "expand"),
    ("mamba_num_heads", "mamba_head_dim", "expand"),
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("n_mamba_heads", "mamba_headdim", "mamba_expand"),
)
"""Names for heads, their size, and the inner width by the hidden size, which heads times size must come to."""


def shrink(config: Any) -> Any:
    """A copy of a text config with two layers (or one of each kind), narrow, and a window of `WINDOW` tokens."""
    small = copy.deepcopy(config)
    for name, size in SIZES.items():
        if type(_get(small, name)) is int:
            _set(small, name, size)
    if isinstance(_get(small, "num_key_value_heads"), int):
        alike = config.num_key_value_heads == getattr(config, "num_attention_heads", 1)
        _set(small, "num_key_value_heads", 4 if alike or getattr(config, "kv_lora_rank", None) else 2)
    _shrink_mixers(small, config)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(small, name, None) is not None:
            setattr(small, name, 0)
    _shrink_layers(small, list(getattr(config, "layer_types", None) or []))
    return small


def _shrink_mixers(small: Any, config: Any) -> None:
    """Sizes that follow from others: heads of state-space layers, and attention wider than the residual stream."""
    for heads, size, factor in MIXERS:
        if all(isinstance(_get(small, name), int) for name in (heads, size, factor)):
            _set(small, heads, getattr(small, factor) * SIZES["hidden_size"] // getattr(small, size))
    wide, hidden = _get(config, "attention_hidden_size"), _get(config, "hidden_size")
    if isinstance(wide, int) and isinstance(hidden, int):
        width = SIZES["hidden_size"] * max(1, wide // hidden)
        _set(small, "attention_hidden_size", width)
        if isinstance(_get(small, "attention_head_dim"), int):
            _set(small, "attention_head_dim", width // SIZES["num_attention_heads"])


def _shrink_layers(small: Any, all_kinds: list[str]) -> None:
    kinds = list(dict.fromkeys(all_kinds))
    layers = max(2, len(kinds))
    if _get(small, "num_kv_shared_layers"):  # the last ones attend to the keys of one of each kind before them
        layers = 2 * max(1, len(kinds))
        small.num_kv_shared_layers = layers // 2
    if kinds and not _set(small, "layer_types", (kinds * layers)[:layers]):
        # They follow from other settings: as many layers as it takes to have one of each kind.
        layers = max(2, *(all_kinds.index(kind) + 1 for kind in kinds))
    for name, value in list(vars(small).items()):
        if isinstance(value, list) and len(value) == len(all_kinds) and name != "layer_types":  # one for each layer
            _set(small, name, [SIZES.get(name, item) if type(item) is int else item for item in value[:layers]])
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if isinstance(getattr(small, name, None), int):
            _set(small, name, layers)


def _get(config: Any, name: str) -> Any:
    """None for what there is not, or what each layer has for itself."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers' own, of no public class
        return None


def _set(config: Any, name: str, value: Any) -> bool:
    """False for what is no setting of its own but follows from others."""
    try:
        setattr(config, name, value)
    except AttributeError:
        return False
    return True


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
