"""The decoder layer of EAGLE checkpoints: its tensors' names, and its sizes from their shapes and a Llama config."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from medusa_spec.errors import CheckpointError, UnsupportedError
from medusa_spec.formats.contents import Contents
from medusa_spec.formats.layout import Shapes, compare_config

PRODUCTS = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)
NAMES = (*PRODUCTS, "post_attention_layernorm.weight")
"""What every such layer has, as this library has it, too."""
BIASES = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
"""What some have beside it."""

STEPS = 8
"""How deep a tree may be: the files do not say, since one layer serves all depths. EAGLE-3's own code goes so far."""
CHAIN = 5
"""Guesses of a draft without a tree, where the config names no number."""

VARIANTS = (
    (r"(layers|midlayer)\.(0\.)?(self_attn\.o|mlp\.(gate|up|down))_proj\.bias", "biases of products but q, k and v"),
    (r"(layers|midlayer)\.(0\.)?self_attn\.[qk]_norm\.weight", "norms of queries and keys"),
    (r"(layers|midlayer)\.(0\.)?self_attn\.(kv_a|kv_b|q_a|q_b)_.*", "latent attention"),
    (r"(layers|midlayer)\.(0\.)?mlp\.(experts|gate)\..*", "a mixture of experts"),
    (r"layers\.[1-9]\d*\..*", "more than one layer"),
    (r"parallel_draft_heads\..*|mask_hidden", "several guesses of one pass (parallel drafting)"),
    (r".*_proj\.(weight_scale|qweight|scales|weight_packed)", "quantised weights"),
)
"""Names of tensors that such a layer has in variants which are not read, and what they are."""


def refuse_variants(
    contents: Contents, family: str, found: list[str], variants: tuple[tuple[str, str], ...] = ()
) -> None:
    """Raises UnsupportedError where tensors or the config speak of something that our layer does not compute."""
    for pattern, what in (*VARIANTS, *variants):
        example = next((name for name in found if re.fullmatch(pattern, name)), None)
        if example is not None:
            refuse(contents, family, f"with {what} ({example})")
    config = layer_config(contents)
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        refuse(contents, family, f"with hidden_act {activation!r}: only 'silu' is read")
    rope = rope_of(config)
    if rope_type(rope) not in SCALINGS or rope.get("attention_factor") is not None:
        refuse(
            contents, family, f"with rotary positions of type {rope_type(rope)!r} ({rope}): only {[*SCALINGS]} are read"
        )
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        refuse(contents, family, f"with partial_rotary_factor {partial}: only whole heads are rotated here")


def refuse(contents: Contents, family: str, what: str) -> None:
    """Raises UnsupportedError for a variant of a family."""
    raise UnsupportedError(
        f"{contents.folder} holds {family} heads {what}, which is not supported yet; use others, or train some with "
        "`medusa-spec finetune`"
    )


def layer_config(contents: Contents) -> Mapping[str, Any]:
    """What describes the layer: the config, or in checkpoints of `speculators` a part of it."""
    nested = contents.config.get("transformer_layer_config")
    return nested if isinstance(nested, dict) else contents.config


def rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a Llama config says of its rotary positions beside their base, under the name of its time."""
    found = config.get("rope_scaling") or config.get("rope_parameters")
    return found if isinstance(found, dict) else {}


def rope_type(rope: Mapping[str, Any]) -> str:
    """How they are stretched, under the key of its time."""
    return str(rope.get("rope_type", rope.get("type", "default")))


SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Ways to stretch positions that are read, and what the config says of each, in the order of our option."""


def layer_names(contents: Contents, prefix: str, found: Iterable[str]) -> dict[str, str]:
    """Our names of the layer's tensors to the checkpoint's, with biases where the tensors or the config have any."""
    biased = contents.config.get("qkv_bias") is True or any(prefix + name in found for name in BIASES)
    return {f"heads.0.layer.{name}": prefix + name for name in (*NAMES, *(BIASES if biased else ()))}


def layer_options(contents: Contents, format: str, shapes: Shapes, prefix: str) -> dict[str, Any]:
    """The sizes of the layer, as options.

    Args:
        contents: The checkpoint.
        format: For errors.
        shapes: Of its tensors, by their names.
        prefix: What stands there before `NAMES`.

    Raises:
        CheckpointError: If config and shapes allow no such layer.
    """
    config = layer_config(contents)
    rows = {name: shapes[prefix + name][0] for name in PRODUCTS}
    heads = _positive(contents, config, "num_attention_heads", int)
    queries, keys = rows["self_attn.q_proj.weight"], rows["self_attn.k_proj.weight"]
    said = config.get("head_dim")
    dim = queries // heads
    if dim * heads != queries or keys % dim or said not in (None, dim):
        raise CheckpointError(
            f"{contents.folder}, {format} heads: {prefix}self_attn.q_proj.weight must have num_attention_heads x "
            f"head_dim = {heads} x {said or dim} rows, as the config says, and {prefix}self_attn.k_proj.weight a "
            f"multiple of head_dim, got {queries} and {keys}; the config is that of another checkpoint"
        )
    counted = {"num_key_value_heads": keys // dim, "intermediate_size": rows["mlp.gate_proj.weight"]}
    for key, number in counted.items():
        compare_config(replace(contents, config=dict(config)), key, [key], number)
    rope = rope_of(config)
    theta = rope.get("rope_theta", config.get("rope_theta"))
    scaling = [_positive(contents, {**config, **rope}, key, float) for key in SCALINGS[rope_type(rope)]]
    return {
        "num_attention_heads": heads,
        "head_dim": dim,
        **counted,
        # What Llama configs leave out is this.
        "rope_theta": 10_000.0 if theta is None else _positive(contents, {"rope_theta": theta}, "rope_theta", float),
        "rms_norm_eps": _positive(contents, {"rms_norm_eps": 1e-6, **config}, "rms_norm_eps", float),
        "rope_scaling": f"{rope_type(rope)}:{','.join(map(repr, scaling))}" if scaling else "",
        "qkv_bias": prefix + BIASES[0] in shapes,
    }


def _positive(contents: Contents, config: Mapping[str, Any], key: str, kind: type[Any]) -> Any:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or not value > 0:
        raise CheckpointError(
            f"{contents.folder}: the config must say {key}, a number above 0, got {value!r}; it cannot be read off the "
            "tensors"
        )
    return kind(value)
