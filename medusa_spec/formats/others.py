"""Draft models that are recognised only to be refused by name. Knows how they look, not how they work."""

import re

from medusa_spec.errors import UnsupportedError
from medusa_spec.formats.contents import Contents

FAMILIES = {
    "EAGLE": re.compile(r"fc\.(weight|bias)|fusion_fc\.(weight|bias)|parallel_draft_heads\..*"),
    "MTP (multi-token prediction)": re.compile(r"(.*\.)?mtp(_layers|_block)?\..*|(.*\.)?(eh_proj|enorm|hnorm)\.weight"),
    "MLP speculator": re.compile(r"speculator\..*|(ln|head)\.\d+\.(weight|bias)"),
}
"""Families by the names of their tensors."""


def refuse_by_config(contents: Contents) -> None:
    """Raises UnsupportedError for checkpoints of `speculators`, whose config names the family, but for EAGLE-3."""
    family = contents.config.get("speculators_model_type")
    if family not in (None, "eagle3"):
        raise _unsupported(contents, f"a {family} draft model in the format of `speculators`")


def refuse_by_names(contents: Contents) -> None:
    """Raises UnsupportedError, naming the family, if the tensors are those of a draft model known but not read."""
    for family, names in FAMILIES.items():
        example = next((name for name in contents.files if names.fullmatch(name)), None)
        if example is not None:
            raise _unsupported(contents, f"{family} weights ({example})")


def _unsupported(contents: Contents, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{contents.folder} holds {what}, which this version does not support yet; use heads of a kind that is read "
        "(docs/formats.md), or train some with `medusa-spec finetune`"
    )
