"""Heads: from the target's hidden state to draft logits. One family a file."""

from medusa_spec.heads.config import HeadsConfig as HeadsConfig
from medusa_spec.heads.draft_vocabulary import coverage as coverage
from medusa_spec.heads.draft_vocabulary import index_of as index_of
from medusa_spec.heads.draft_vocabulary import most_frequent as most_frequent
from medusa_spec.heads.medusa import MedusaHeads as MedusaHeads
from medusa_spec.heads.projection import Projection as Projection
from medusa_spec.heads.stacked import StackedMedusaHeads as StackedMedusaHeads

__all__ = [
    "HeadsConfig",
    "MedusaHeads",
    "Projection",
    "StackedMedusaHeads",
    "coverage",
    "index_of",
    "most_frequent",
]
