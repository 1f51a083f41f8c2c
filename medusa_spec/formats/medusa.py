"""What all layouts of Medusa heads share: K heads of L blocks, numbered in the names. Knows no format."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from medusa_spec.formats.contents import Contents
from medusa_spec.formats.layout import Layout, check_names, compare_config, count

HEADS_KEYS = ("medusa_num_heads", "num_medusa_heads")
LAYERS_KEYS = ("medusa_num_layers", "num_medusa_layers")


def pattern(template: str) -> re.Pattern[str]:
    """Matches the names that a template makes: `blocks.{head}.layers.{layer}.{part}`."""
    text = re.escape(template)
    for place, values in (("head", r"\d+"), ("layer", r"\d+"), ("part", "weight|bias")):
        text = text.replace(rf"\{{{place}\}}", f"(?P<{place}>{values})")
    return re.compile(text)


def medusa_layout(
    contents: Contents,
    found: Mapping[str, str],
    *,
    format: str,
    linear: str,
    lm_head: str,
    shared: str | None = None,
    biases: bool = True,
    heads_keys: Sequence[str] = HEADS_KEYS,
    layers_keys: Sequence[str] = LAYERS_KEYS,
) -> Layout:
    """The layout of numbered heads, after a check that every tensor is there and none too many.

    Args:
        contents: The checkpoint.
        found: The names that should be the heads', without what stands before all of them, to the names as they are.
        format: Its name, for people.
        linear: Template of a block's tensors, of `head`, `layer` and `part`.
        lm_head: Template of a head's LM head, of `head` and `layer`, which is there the number of blocks.
        shared: `"target"`, no LM head is expected; a name of `found`, that one is all heads'; None, each has its own.
        biases: Blocks have biases.
        heads_keys: Keys of the config that should say K.
        layers_keys: Keys of the config that should say how many blocks a head has.
    """
    blocks = [match for name in found if (match := pattern(linear).fullmatch(name))]
    heads = count(contents, "heads", (int(match["head"]) for match in blocks))
    layers = count(contents, "blocks", (int(match["layer"]) for match in blocks))
    parts = ("weight", "bias") if biases else ("weight",)
    names = {
        f"heads.{head}.blocks.{layer}.linear.{part}": linear.format(head=head, layer=layer, part=part)
        for head in range(heads)
        for layer in range(layers)
        for part in parts
    }
    if shared is None:
        names |= {f"heads.{k}.lm_head.weight": lm_head.format(head=k, layer=layers) for k in range(heads)}
    others = [] if shared in (None, "target") else [shared]
    check_names(contents, format, [*names.values(), *others], found)
    compare_config(contents, "heads", heads_keys, heads)
    compare_config(contents, "blocks per head", layers_keys, layers)
    layout = Layout(
        format=format,
        kind="medusa",
        num_heads=heads,
        num_layers=layers,
        names={ours: found[theirs] for ours, theirs in names.items()},
        own_lm_heads=shared is None,
        biases=biases,
    )
    return layout if shared in (None, "target") else replace(layout, one_lm_head=found[shared])
