"""EAGLE-3 checkpoints: `midlayer.*` as the authors write it, `layers.0.*` as the library `speculators` does."""

import re
from typing import Any

from medusa_spec.errors import CheckpointError
from medusa_spec.formats.contents import Contents
from medusa_spec.formats.decoder_layer import (
    CHAIN,
    STEPS,
    layer_config,
    layer_names,
    layer_options,
    refuse,
    refuse_variants,
)
from medusa_spec.formats.layout import Fit, Layout, Shapes, check_names

FORMAT = "EAGLE-3"
MARK = re.compile(r"midlayer\..*|layers\.0\.hidden_norm\.weight|d2t|t2d")
FC, NORM, LM_HEAD, OFFSETS, TABLE, EMBEDDING = (
    "fc.weight",
    "norm.weight",
    "lm_head.weight",
    "d2t",
    "t2d",
    "embed_tokens.weight",
)
LAYER_NORMS = ("input_layernorm.weight", "hidden_norm.weight")
VARIANTS = (
    (r"input_norm\.weight|fc_norm.*", "a norm before fc"),
    (r"fc\.bias", "a bias of fc"),
)
ONLY: dict[str, Any] = {
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "embed_requires_grad": False,
    "parallel_draft_step": 1,
}
"""Settings in configs that change what is computed, and the only value of each that is read."""
UNKNOWN = ("aux_hidden_state_layer_ids", "target_layer_ids")
"""Keys of forks for the tapped layers."""


def eagle3_layout(contents: Contents) -> Layout | None:
    """The layout if these are such heads, else None.

    Raises:
        UnsupportedError: If they are of a variant that is not supported.
        CheckpointError: If they are EAGLE-3 heads, but not whole.
    """
    found = contents.names_beside(MARK)
    if not found:
        return None
    _refuse(contents, found)
    prefix = "midlayer." if any(name.startswith("midlayer.") for name in found) else "layers.0."
    names = {"heads.0.fc.weight": FC, "heads.0.norm.weight": NORM}
    names |= layer_names(contents, prefix, found)
    names |= {f"heads.0.{name}": prefix + name for name in LAYER_NORMS}
    mapped = OFFSETS in found or TABLE in found or _cut(contents)
    own = mapped or LM_HEAD in found
    if own:
        names["heads.0.lm_head.weight"] = LM_HEAD
    optional = [name for name in (EMBEDDING, TABLE) if name in found]
    check_names(contents, FORMAT, [*names.values(), *optional, *([OFFSETS] if mapped else [])], found)
    chain = _told(contents) or CHAIN
    return Layout(
        format=f"{FORMAT} (speculators)" if "speculators_model_type" in contents.config else FORMAT,
        kind="eagle3",
        num_heads=max(STEPS, chain),
        num_layers=1,
        names=names,
        own_lm_heads=own,
        offsets=(OFFSETS, TABLE if TABLE in found else None) if mapped else None,
        embedding=EMBEDDING if EMBEDDING in found else None,
        fit=_fit(contents, prefix),
        chain=chain,
    )


def _settings(contents: Contents) -> dict[str, Any]:
    """The config with what stands in its `eagle_config`."""
    nested = contents.config.get("eagle_config")
    return contents.config | (nested if isinstance(nested, dict) else {})


def _refuse(contents: Contents, found: list[str]) -> None:
    refuse_variants(contents, FORMAT, found, VARIANTS)
    settings = _settings(contents)
    for key, only in ONLY.items():
        value = settings.get(key)
        if value is not None and value != only:
            refuse(contents, FORMAT, f"with {key} = {value!r}: only {only!r} is read")
    for key in UNKNOWN:
        if settings.get(key) is not None:
            refuse(contents, FORMAT, f"with layers named by {key}, which are numbered in ways of their own")
    wide, own = settings.get("target_hidden_size"), layer_config(contents).get("hidden_size")
    if None not in (wide, own) and wide != own:
        refuse(contents, FORMAT, f"of width {own} for a target of width {wide}: only equal widths are read")


def _cut(contents: Contents) -> bool:
    """Whether the config speaks of a draft vocabulary."""
    draft, whole = contents.config.get("draft_vocab_size"), layer_config(contents).get("vocab_size")
    return isinstance(draft, int) and isinstance(whole, int) and draft < whole


def _told(contents: Contents) -> int | None:
    """Guesses of a draft by the config of `speculators`."""
    config = contents.config.get("speculators_config")
    methods = config.get("proposal_methods") if isinstance(config, dict) else None
    if not isinstance(methods, list) or not isinstance(config, dict):
        return None
    known = [method for method in methods if isinstance(method, dict)]
    default = [method for method in known if method.get("proposal_type") == config.get("default_proposal_method")]
    told = (default or known or [{}])[0].get("speculative_tokens")
    return told if type(told) is int and told > 0 else None


def _fit(contents: Contents, prefix: str) -> Fit:
    def fit(shapes: Shapes, hidden_size: int, layers: int | None) -> dict[str, Any]:
        width, columns = shapes[FC]
        if width != hidden_size or columns % hidden_size:
            raise CheckpointError(
                f"{contents.folder}: {FC} must have shape ({hidden_size}, a multiple of {hidden_size}) for this "
                f"target, got {(width, columns)}; the heads are for another model, or of another width than their own"
            )
        return {
            "taps": ",".join(map(str, _taps(contents, columns // hidden_size, layers))),
            "from_h": False,
            "norm_before_residual": contents.config.get("norm_before_residual") is True,
            **layer_options(contents, FORMAT, shapes, prefix),
        }

    return fit


def _taps(contents: Contents, count: int, layers: int | None) -> tuple[int, ...]:
    """The layers whose inputs are read: those that the config names, else those of the authors' code.

    `eagle_aux_hidden_state_layer_ids` at the top numbers them as we do, 0 being the embeddings; inside `eagle_config`
    it numbers layers whose outputs are read.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    nested, told = contents.config.get("eagle_config"), contents.config.get(key)
    inside = nested.get(key) if isinstance(nested, dict) else None
    if inside is not None and all(type(layer) is int for layer in inside):
        moved = [layer + 1 for layer in inside]
        if told is not None and list(told) != moved:
            raise CheckpointError(
                f"{contents.folder}: the config must name the layers that are read once, got {key} = {told}, inputs, "
                f"and inside eagle_config {inside}, outputs; remove the one that is wrong"
            )
        told = moved
    if told is None and layers is not None:
        told = (2, layers // 2, layers - 3)
    found = tuple(told or ())
    rising = all(type(layer) is int and layer >= 0 for layer in found) and list(found) == sorted(set(found))
    if not rising or len(found) != count or (layers is not None and found[-1] >= layers):
        raise CheckpointError(
            f"{contents.folder}: the layers of the target that are read must be {count} rising numbers below its "
            f"{layers}, as {FC} is for {count}, got {found}; the heads are for another model"
        )
    return found
