"""Heads: from the target's hidden state to draft logits. One family a file."""

from medusa_spec.heads.autoregressive import AutoregressiveHead as AutoregressiveHead
from medusa_spec.heads.autoregressive import AutoregressiveHeads as AutoregressiveHeads
from medusa_spec.heads.base import DraftHeads as DraftHeads
from medusa_spec.heads.config import HeadsConfig as HeadsConfig
from medusa_spec.heads.draft_vocabulary import coverage as coverage
from medusa_spec.heads.draft_vocabulary import index_of as index_of
from medusa_spec.heads.draft_vocabulary import most_frequent as most_frequent
from medusa_spec.heads.embedding import TokenEmbedding as TokenEmbedding
from medusa_spec.heads.families import FAMILIES as FAMILIES
from medusa_spec.heads.families import LEVELS as LEVELS
from medusa_spec.heads.families import fitted_options as fitted_options
from medusa_spec.heads.families import make_heads as make_heads
from medusa_spec.heads.families import options_of as options_of
from medusa_spec.heads.head import Head as Head
from medusa_spec.heads.hydra import HydraHeads as HydraHeads
from medusa_spec.heads.levels import LevelHeads as LevelHeads
from medusa_spec.heads.medusa import MedusaHeads as MedusaHeads
from medusa_spec.heads.mlp_speculator import SpeculatorHeads as SpeculatorHeads
from medusa_spec.heads.options import parse_options as parse_options
from medusa_spec.heads.projection import Projection as Projection
from medusa_spec.heads.recurrent import RecurrentHeads as RecurrentHeads
from medusa_spec.heads.stacked import StackedMedusaHeads as StackedMedusaHeads
from medusa_spec.heads.view import Room as Room
from medusa_spec.heads.view import View as View
from medusa_spec.heads.view import attention as attention

__all__ = [
    "FAMILIES",
    "LEVELS",
    "AutoregressiveHead",
    "AutoregressiveHeads",
    "DraftHeads",
    "Head",
    "HeadsConfig",
    "HydraHeads",
    "LevelHeads",
    "MedusaHeads",
    "Projection",
    "RecurrentHeads",
    "Room",
    "SpeculatorHeads",
    "StackedMedusaHeads",
    "TokenEmbedding",
    "View",
    "attention",
    "coverage",
    "fitted_options",
    "index_of",
    "make_heads",
    "most_frequent",
    "options_of",
    "parse_options",
]
