"""Heads in checkpoints of other projects: one file per format. From foreign tensors to ours; no format is written."""

from medusa_spec.formats.contents import CONFIG_FILE as CONFIG_FILE
from medusa_spec.formats.contents import has_tensors as has_tensors
from medusa_spec.formats.convert import foreign_target as foreign_target
from medusa_spec.formats.convert import read_foreign as read_foreign
from medusa_spec.formats.hub import fetch as fetch
from medusa_spec.formats.hub import speaks_of_heads as speaks_of_heads

__all__ = ["CONFIG_FILE", "fetch", "foreign_target", "has_tensors", "read_foreign", "speaks_of_heads"]
