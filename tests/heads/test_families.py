"""Every kind has a family, and every sequential family a form for decoding."""

from medusa_spec.heads.config import KINDS
from medusa_spec.heads.families import FAMILIES, LEVELS


def test_every_kind_is_a_family():
    assert tuple(FAMILIES) == KINDS


def test_every_sequential_family_drafts_by_levels():
    assert {kind for kind, family in FAMILIES.items() if family.sequential} == set(LEVELS)
