"""Every kind has a family, and every sequential family a form for decoding."""

import pytest

from medusa_spec.heads.config import KINDS
from medusa_spec.heads.families import FAMILIES, LEVELS, options_of


def test_every_kind_is_a_family():
    assert tuple(FAMILIES) == KINDS


def test_every_sequential_family_drafts_by_levels():
    assert {kind for kind, family in FAMILIES.items() if family.sequential} == set(LEVELS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_has_a_default_and_unknown_ones_are_refused(kind):
    assert options_of(kind, {}) == FAMILIES[kind].Options()
    with pytest.raises(ValueError, match=f"options of {kind} heads must be among"):
        options_of(kind, {"no_such": 1})
