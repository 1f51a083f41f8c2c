"""Every causal LM of transformers as a tiny random float64 model. Knows sizes of configs, nothing of decoding."""

import re
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from medusa_spec import twin

NAMES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Model class by architecture (`model_type`)."""

VOCAB = twin.SIZES["vocab_size"]
LENGTH = 128

SIZES: dict[str, Any] = {
    **twin.SIZES,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), LENGTH),
    **dict.fromkeys(("max_target_positions", "model_max_length"), LENGTH),
    **dict.fromkeys(("num_nextn_predict_layers", "num_kv_shared_layers"), 0),
}
"""Attributes that configs use for sizes, and their tiny values."""

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}
DECODER = {"is_decoder": True, "max_position_embeddings": LENGTH + 2}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
SECTIONED = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
SHARED_KEYS = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": SLIDING}
INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "split_ngram_parts": 1,
}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert"),
        DECODER,
    ),
    **dict.fromkeys(("roberta", "roberta-prelayernorm", "roformer", "xlm-roberta", "xlm-roberta-xl"), DECODER),
    "bamba": {"mamba_n_heads": 8, "mamba_n_groups": 1, "attn_layer_indices": [1], "num_hidden_layers": 3},
    "big_bird": {**DECODER, "attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "num_experts": 4},
    "dory": {
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "num_hidden_layers": 3,
        "layer_types": SLIDING[:3],
    },
    "dots1": {"num_local_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_routed_experts": 4},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 64, "mamba_n_groups": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_n_groups": 1, "layer_types": ["mamba", "attention"]},
    "gemma3n_text": {**SHARED_KEYS, "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "gemma4_text": SHARED_KEYS,
    "gemma4_unified_text": SHARED_KEYS,
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": ..., "H_cycles": 1, "L_cycles": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "cohere_compass_text": {"layer_types": SLIDING[:2], "rope_parameters": dict.fromkeys(SLIDING[:2], SECTIONED)},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {
        **DECODER,
        "axial_pos_embds": False,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 8,
        "hash_seed": 0,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "num_hidden_layers": 2},
    "roc_bert": {
        **DECODER,
        "shape_vocab_size": VOCAB,
        "pronunciation_vocab_size": VOCAB,
        "shape_embed_dim": 8,
        "pronunciation_embed_dim": 8,
    },
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0, "chunk_size": 4},
    "xmod": {**DECODER, "default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid"]},
}
"""What differs from that, by architecture."""

FULLY_DOUBLE = {"xglm"}
"""Architectures that make constants of torch's default dtype, which then must be float64 too."""


def tiny_config(name: str) -> Any:
    """A config of two layers, or one of each kind, with every size in `SIZES` cut down."""
    default = AutoConfig.for_model(name)
    config = _shrunk(default, SPECIAL.get(name, {}))
    text = config.get_text_config(decoder=True)
    text._attn_implementation = config._attn_implementation = None
    return config


def _shrunk(default: Any, special: dict[str, Any]) -> Any:
    known = default.to_dict()
    changes: dict[str, Any] = {key: size for key, size in SIZES.items() if type(known.get(key)) is int}
    changes |= {key: SIZES[key] for key in ("head_dim", "num_key_value_heads") if known.get(key, 0) is None}
    if known.get("num_key_value_heads") == known.get("num_attention_heads") or known.get("kv_lora_rank"):
        changes |= {"num_key_value_heads": 4} if "num_key_value_heads" in known else {}
    changes |= {key: value for key, value in TOKENS.items() if key in known}
    kinds = list(dict.fromkeys(known.get("layer_types") or []))
    if kinds:
        changes["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        changes["num_hidden_layers"] = len(changes["layer_types"])
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            changes[name] = _shrunk(value, {**SPECIAL.get(value.model_type, {}), **special.get(name, {})})
    changes |= {key: value for key, value in special.items() if not isinstance(changes.get(key), PreTrainedConfig)}
    changes = {key: value for key, value in changes.items() if value is not ...}
    return type(default)(**changes)


def tiny_model(name: str) -> PreTrainedModel:
    """A random float64 model, every parameter moved off its initial value; its generation never ends by itself."""
    config = tiny_config(name)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    model = model.to(torch.float64).eval().requires_grad_(False)
    for pattern in model._keep_in_fp32_modules_strict or ():  # code that cannot take anything else
        for key, parameter in model.named_parameters():
            if re.search(rf"(^|\.){pattern}(\.|$)", key):
                parameter.data = parameter.data.float()
    for parameter in model.parameters():  # zeros and ones would hide what they multiply
        parameter.add_(torch.randn_like(parameter) * 0.15)
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return model


def kinds_of(model: PreTrainedModel) -> list[str]:
    """Kinds of a model's layers, each once."""
    config = model.config.get_text_config(decoder=True)
    return list(dict.fromkeys(getattr(config, "layer_types", None) or ["full_attention"]))
