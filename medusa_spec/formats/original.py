"""The authors' own Medusa checkpoints, alone or inside a full model, as TGI and ModelOpt have them, too.

`{head}.{layer}.linear.weight`, `.bias`, and `{head}.{L}.weight`, the head's LM head: none in "version 2".
"""

from dataclasses import replace

from medusa_spec.formats.contents import Contents
from medusa_spec.formats.layout import Layout
from medusa_spec.formats.medusa import medusa_layout, pattern

LINEAR, LM_HEAD = "{head}.{layer}.linear.{part}", "{head}.{layer}.weight"
PREFIXES = {"medusa_head.": "Medusa full model", "medusa_heads.": "ModelOpt Medusa", "": "Medusa"}
"""What stands before all names, and the name of that format for people."""


def original_layout(contents: Contents) -> Layout | None:
    """The layout if these are such heads, else None.

    Raises:
        CheckpointError: If they are, but not whole.
    """
    for prefix, format in PREFIXES.items():
        beside = contents.names_beside(pattern(prefix + LINEAR))
        if beside:
            found = {name.removeprefix(prefix): name for name in beside if name.startswith(prefix)}
            layout = _layout(contents, found, format)
            return replace(layout, with_target=any(not name.startswith(prefix) for name in contents.files))
    return None


def _layout(contents: Contents, found: dict[str, str], format: str) -> Layout:
    lm_heads = [name for name in found if pattern(LM_HEAD).fullmatch(name)]
    nested = contents.config.get("medusa")
    if isinstance(nested, dict):  # ModelOpt's
        contents = replace(contents, config=contents.config | nested)
    shared = None
    if not lm_heads:
        shared, format = "target", f"{format}, version 2"
    elif len(lm_heads) == 1 and contents.config.get("original_lm_head") is True:
        shared = lm_heads[0]  # written once, for engines that want every name of the first head
    return medusa_layout(contents, found, format=format, linear=LINEAR, lm_head=LM_HEAD, shared=shared)
