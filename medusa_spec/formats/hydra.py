"""The authors' own Hydra checkpoints: `hydra_mlp.{head}.{layer}.*` and `hydra_lm_head.{head}.*`."""

import re

from medusa_spec.errors import UnsupportedError
from medusa_spec.formats.contents import Contents
from medusa_spec.formats.layout import Layout, check_names, compare_config, count

BLOCK = re.compile(r"hydra_mlp\.(?P<head>\d+)\.(?P<layer>\d+)\.(linear|res_connection)\.(weight|bias)")
EMBEDDING = "input_embed_fn.weight"
FORMAT = "Hydra"


def hydra_layout(contents: Contents) -> Layout | None:
    """The layout if these are such heads, else None.

    Raises:
        UnsupportedError: If they are of a variant that is not supported.
        CheckpointError: If they are Hydra heads, but not whole.
    """
    found = contents.names_beside(BLOCK)
    if not found:
        return None
    _refuse_variants(contents, found)
    blocks = [match for name in found if (match := BLOCK.fullmatch(name))]
    heads = count(contents, "heads", (int(match["head"]) for match in blocks))
    layers = count(contents, "blocks", (int(match["layer"]) for match in blocks))
    names = {ours: theirs for k in range(heads) for ours, theirs in _head(k, layers).items()}
    embedding = EMBEDDING if EMBEDDING in found else None
    check_names(contents, FORMAT, [*names.values(), *([embedding] if embedding else [])], found)
    compare_config(contents, "heads", ["hydra_num_heads"], heads)
    compare_config(contents, "blocks per head", ["hydra_num_layers"], layers)
    return Layout(
        format=FORMAT,
        kind="hydra",
        num_heads=heads,
        num_layers=layers,
        names=names,
        own_lm_heads=True,
        lm_head_bias=True,
        residual="linear",
        embedding=embedding,
    )


def _head(k: int, layers: int) -> dict[str, str]:
    """Our names of a head's tensors to theirs."""
    modules = {f"heads.{k}.first": f"hydra_mlp.{k}.0.linear", f"heads.{k}.residual": f"hydra_mlp.{k}.0.res_connection"}
    for layer in range(1, layers):
        modules[f"heads.{k}.blocks.{layer - 1}.linear"] = f"hydra_mlp.{k}.{layer}.linear"
    modules[f"heads.{k}.lm_head"] = f"hydra_lm_head.{k}"
    return {f"{ours}.{part}": f"{theirs}.{part}" for ours, theirs in modules.items() for part in ("weight", "bias")}


def _refuse_variants(contents: Contents, found: list[str]) -> None:
    config, variant = contents.config, None
    if any(re.match(r"prefix_embed+ing_layer\.", name) for name in found):
        variant = "prefix-mlp (Hydra++): its heads read a transformer layer with a cache of its own over the whole text"
    elif not any(".res_connection." in name for name in found):
        variant = "ungrounded: its heads do not see the tokens before the one they guess"
    elif config.get("hydra_head_arch", "mlp") != "mlp":
        variant = f"{config['hydra_head_arch']}: only mlp heads are read"
    elif config.get("hidden_state_offset", 0) != 0:
        variant = f"hidden_state_offset {config['hidden_state_offset']}: its heads read an earlier layer than the last"
    if variant is not None:
        raise UnsupportedError(
            f"{contents.folder} holds Hydra heads of the variant {variant}, which is not supported yet; use Hydra "
            "heads of the mlp variant, or train heads with `medusa-spec finetune`"
        )
