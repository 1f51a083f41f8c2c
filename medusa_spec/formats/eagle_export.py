"""EAGLE-1 and EAGLE-3 heads for engines, in the names of their authors and a Llama config. Knows no folder."""

from typing import Any

import torch

from medusa_spec.backbone import Backbone
from medusa_spec.formats.decoder_layer import BIASES, NAMES, SCALINGS
from medusa_spec.formats.eagle import FC, PREFIX
from medusa_spec.formats.eagle3 import LAYER_NORMS, LM_HEAD, NORM, OFFSETS, TABLE
from medusa_spec.formats.engine_limits import check_limits, refuse
from medusa_spec.formats.exported import Exported, plain
from medusa_spec.heads import DraftHeads
from medusa_spec.heads.rotary import parse_scaling

FILE = "model.safetensors"
EAGLE3_PREFIX = "midlayer."


def engine_eagle(heads: DraftHeads, backbone: Backbone) -> Exported:
    """EAGLE-1 heads for vLLM: the layer and the joining product; the rest is the target's.

    Raises:
        UnsupportedError: If the heads have what the format cannot carry.
    """
    format = "EAGLE heads"
    _check(heads, backbone, format, reads_h=True)
    if heads.options.bias:
        refuse(heads, format, "vLLM's joining product has no bias, and this one has")
    if heads.config.lm_head != "shared":
        refuse(heads, format, f"engines take the target's LM head, and these have lm_head={heads.config.lm_head!r}")
    state = heads.state_dict()
    fc = state["heads.0.fc.weight"]
    scale = heads.embedding.scale if heads.embedding is not None else 1.0
    if scale != 1.0:  # engines hand the heads embeddings without the target's factor on them
        vector, feature = fc.chunk(2, dim=1)
        fc = torch.cat([(vector.double() * scale).to(fc.dtype), feature], dim=1)
    notes = () if heads.draft_ids is None else (
        f"the format has no draft vocabulary: where a token outside its {len(heads.draft_ids)} looks likeliest, an "
        "engine guesses that one; output is the same, acceptance may differ a little",
    )  # fmt: skip
    return Exported(
        format=format,
        file=FILE,
        tensors={FC: plain(fc)} | _layer(state, PREFIX),
        config={"architectures": ["LlamaForCausalLM"], **_config(heads, backbone)},
        same_guesses=heads.draft_ids is None,
        notes=notes,
    )


def engine_eagle3(heads: DraftHeads, backbone: Backbone) -> Exported:
    """EAGLE-3 heads for vLLM, with their LM head over the draft vocabulary.

    Raises:
        UnsupportedError: If the heads have what the format cannot carry.
    """
    format = "EAGLE-3 heads"
    _check(heads, backbone, format, reads_h=False)
    options = heads.options
    if options.from_h:
        refuse(
            heads,
            format,
            "their features begin with h, and published ones with the tapped layers alone",
            "train with --option from_h=false for engines",
        )
    if not options.layers:
        refuse(heads, format, "they tap no layers of the target", "train with taps for engines")
    if options.qkv_bias:
        refuse(heads, format, "engines give q, k and v biases only together with o, and these have none there")
    if heads.config.lm_head == "low_rank":
        refuse(heads, format, "its LM head is one matrix, and these have a low-rank addition to the target's")
    state = heads.state_dict()
    head: Any = heads.head(0)
    lm_head = head.lm_head.weight if heads.config.lm_head == "own" else heads.projection.weight
    if heads.projection.scale != 1.0:
        lm_head = (lm_head.double() * heads.projection.scale).to(lm_head.dtype)
    tensors = {name: plain(state[f"heads.0.{name}"]) for name in (FC, NORM)} | {LM_HEAD: plain(lm_head)}
    tensors |= _layer(state, EAGLE3_PREFIX)
    tensors |= {EAGLE3_PREFIX + name: plain(state[f"heads.0.{name}"]) for name in LAYER_NORMS}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": heads.config.num_draft_tokens,
        "eagle_aux_hidden_state_layer_ids": list(options.layers),
        "num_aux_hidden_states": len(options.layers),
        "norm_before_residual": options.norm_before_residual,
        **_config(heads, backbone),
    }
    return Exported(format=format, file=FILE, tensors=tensors | _maps(heads), config=config)


def _check(heads: DraftHeads, backbone: Backbone, format: str, *, reads_h: bool) -> None:
    if not heads.options.tied:
        refuse(heads, format, "one layer serves all steps there, and these have one for each", "train with tied=true")
    check_limits(heads, backbone, format, reads_h=reads_h)


def _layer(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    names = [name for name in (*NAMES, *BIASES) if f"heads.0.layer.{name}" in state]
    return {prefix + name: plain(state[f"heads.0.layer.{name}"]) for name in names}


def _config(heads: DraftHeads, backbone: Backbone) -> dict[str, Any]:
    """A Llama config of the one layer."""
    sizes = heads.options.filled(heads.config.hidden_size)
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": heads.config.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope_theta,
        "vocab_size": heads.config.vocab_size,
        "tie_word_embeddings": False,
    }
    longest = getattr(backbone.config, "max_position_embeddings", None)
    if longest is not None:
        config["max_position_embeddings"] = longest
    if sizes.qkv_bias:
        config["qkv_bias"] = True
    if sizes.rope_scaling:
        kind, numbers = parse_scaling(sizes.rope_scaling)
        config["rope_scaling"] = {"rope_type": kind, **dict(zip(SCALINGS[kind], numbers, strict=True))}
    return config


def _maps(heads: DraftHeads) -> dict[str, torch.Tensor]:
    """What the rows of the LM head stand for: what to add to their numbers, and which of all V they are."""
    ids = heads.draft_ids
    if ids is None:
        return {}
    table = torch.zeros(heads.config.vocab_size, dtype=torch.bool)
    table[ids.cpu()] = True
    return {OFFSETS: ids.cpu() - torch.arange(len(ids)), TABLE: table}
