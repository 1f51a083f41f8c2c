"""EAGLE-1 and EAGLE-2 checkpoints of the authors and of servers: `fc.*` and `layers.0.*`, no first norm."""

import re

from medusa_spec.formats.contents import Contents
from medusa_spec.formats.decoder_layer import CHAIN, STEPS, layer_names, layer_options, refuse_variants
from medusa_spec.formats.layout import Fit, Layout, Shapes, check_names, compare_config

FORMAT = "EAGLE"
PREFIX = "layers.0."
LAYER = re.compile(r"layers\.0\.(self_attn|mlp)\..*")
FC, BIAS, EMBEDDING = "fc.weight", "fc.bias", "embed_tokens.weight"


def eagle_layout(contents: Contents) -> Layout | None:
    """The layout if these are such heads, else None.

    Raises:
        UnsupportedError: If they are of a variant that is not supported.
        CheckpointError: If they are EAGLE heads, but not whole.
    """
    found = contents.names_beside(LAYER)
    if FC not in found:
        return None
    refuse_variants(contents, FORMAT, found)
    names = {"heads.0.fc.weight": FC} | layer_names(contents, PREFIX, found)
    if BIAS in found or contents.config.get("bias") is True:
        names["heads.0.fc.bias"] = BIAS
    optional = [EMBEDDING] if EMBEDDING in found else []
    check_names(contents, FORMAT, [*names.values(), *optional], found)
    compare_config(contents, "bias of fc", ["bias"], int(BIAS in found))
    return Layout(
        format=FORMAT,
        kind="eagle",
        num_heads=STEPS,
        num_layers=1,
        names=names,
        own_lm_heads=False,
        embedding=EMBEDDING if optional else None,
        fit=_fit(contents, biased=BIAS in found),
        chain=CHAIN,
    )


def _fit(contents: Contents, *, biased: bool) -> Fit:
    def fit(shapes: Shapes, hidden_size: int, layers: int | None) -> dict[str, object]:
        return {"bias": biased, **layer_options(contents, FORMAT, shapes, PREFIX)}

    return fit
