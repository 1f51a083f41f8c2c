"""Drafters: what proposes a tree."""

from medusa_spec.drafters.base import Drafter as Drafter
from medusa_spec.drafters.base import DraftSession as DraftSession
from medusa_spec.drafters.base import FixedDraft as FixedDraft
from medusa_spec.drafters.base import ReadStates as ReadStates
from medusa_spec.drafters.base import check_draft as check_draft
from medusa_spec.drafters.heads import HeadsDrafter as HeadsDrafter
from medusa_spec.drafters.hybrid import HybridDrafter as HybridDrafter
from medusa_spec.drafters.ngram import NgramDrafter as NgramDrafter
from medusa_spec.drafters.suffix import SuffixDrafter as SuffixDrafter
from medusa_spec.drafters.suffix_corpus import SuffixCorpus as SuffixCorpus

__all__ = [
    "DraftSession",
    "Drafter",
    "FixedDraft",
    "HeadsDrafter",
    "HybridDrafter",
    "NgramDrafter",
    "ReadStates",
    "SuffixCorpus",
    "SuffixDrafter",
    "check_draft",
]
