"""vLLM's own names of Medusa heads.

`blocks.{head}.layers.{layer}.weight` (and `.bias`), `lm_heads.{head}.weight` or one `lm_head.weight`, `token_map`.
"""

import warnings
from dataclasses import replace

from medusa_spec.errors import CheckpointError
from medusa_spec.formats.contents import Contents
from medusa_spec.formats.layout import Layout
from medusa_spec.formats.medusa import HEADS_KEYS, LAYERS_KEYS, medusa_layout, pattern

PREFIX = "medusa_heads."
LINEAR, LM_HEAD = "blocks.{head}.layers.{layer}.{part}", "lm_heads.{head}.weight"
ONE, TOKEN_MAP = "lm_head.weight", "token_map"


def vllm_layout(contents: Contents) -> Layout | None:
    """The layout if these are such heads, else None.

    Raises:
        CheckpointError: If they are, but not whole.
    """
    beside = contents.names_beside(pattern(LINEAR)) or contents.names_beside(pattern(PREFIX + LINEAR))
    if not beside:
        return None
    found = {name.removeprefix(PREFIX): name for name in beside}  # it may stand before any of them
    token_map = found.pop(TOKEN_MAP, None)
    biases = any((match := pattern(LINEAR).fullmatch(name)) and match["part"] == "bias" for name in found)
    _check_config(contents, biases, token_map)
    layout = medusa_layout(
        contents,
        found,
        format="vLLM Medusa",
        linear=LINEAR,
        lm_head=LM_HEAD,
        shared=_shared(contents, found),
        biases=biases or contents.config.get("medusa_fc_bias") is True,
        heads_keys=("num_heads", *HEADS_KEYS),
        layers_keys=("num_hidden_layers", *LAYERS_KEYS),
    )
    return replace(layout, token_map=token_map, logit_scale=_logit_scale(contents))


def _shared(contents: Contents, found: dict[str, str]) -> str | None:
    """The name of the one LM head of all heads, or None where each has its own."""
    lm_heads = [name for name in found if pattern(LM_HEAD).fullmatch(name)]
    if contents.config.get("original_lm_head") is True and lm_heads == [LM_HEAD.format(head=0)]:
        return lm_heads[0]
    return None if lm_heads else ONE


def _check_config(contents: Contents, biases: bool, token_map: str | None) -> None:
    config = contents.config
    if biases and config.get("medusa_fc_bias") is not True:
        warnings.warn(
            f"{contents.folder}: the config says medusa_fc_bias = {config.get('medusa_fc_bias')}, the file holds "
            "biases; they are used here, while vLLM leaves them out without a word",
            stacklevel=2,
        )
    size, whole = config.get("truncated_vocab_size"), config.get("vocab_size")
    if token_map is None and isinstance(size, int) and isinstance(whole, int) and size < whole:
        raise CheckpointError(
            f"{contents.folder} must hold {TOKEN_MAP}, the ids of the {size} tokens of truncated_vocab_size (of "
            f"{whole}); it is missing"
        )


def _logit_scale(contents: Contents) -> float:
    scale = contents.config.get("logit_scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not scale > 0:
        raise CheckpointError(f"{contents.folder}: logit_scale must be a number above 0, got {scale!r}")
    return float(scale)
