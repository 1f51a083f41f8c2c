"""Every kind has a family, and every sequential family a form for decoding."""

import pytest
from transformers import GPT2Config, LlamaConfig

from medusa_spec.heads.autoregressive import AutoregressiveHeads
from medusa_spec.heads.config import KINDS
from medusa_spec.heads.families import FAMILIES, LEVELS, fitted_options, options_of
from medusa_spec.heads.sizes import LayerSizes

TARGET = LlamaConfig(
    hidden_size=48, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2, intermediate_size=80
)


def test_every_kind_is_a_family():
    assert tuple(FAMILIES) == KINDS


def test_every_sequential_family_drafts_by_levels_or_attends():
    sequential = {kind for kind, family in FAMILIES.items() if family.sequential}
    attending = {kind for kind, family in FAMILIES.items() if family.attends}
    assert sequential == set(LEVELS) | attending and not set(LEVELS) & attending
    assert all(issubclass(FAMILIES[kind], AutoregressiveHeads) for kind in attending)


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_has_a_default_and_unknown_ones_are_refused(kind):
    assert options_of(kind, {}) == FAMILIES[kind].Options()
    with pytest.raises(ValueError, match=f"options of {kind} heads must be among"):
        options_of(kind, {"no_such": 1})


@pytest.mark.parametrize("kind", KINDS)
def test_layers_follow_the_target_and_other_families_are_as_they_were_told(kind):
    found = fitted_options(kind, {}, TARGET)
    if kind == "mtp":
        assert found["decoder"]["num_attention_heads"] == 6 and found["decoder"]["intermediate_size"] == 80
        return
    if not issubclass(FAMILIES[kind].Options, LayerSizes):
        assert found == {}
        return
    options = options_of(kind, found)
    assert (options.num_attention_heads, options.num_key_value_heads, options.head_dim) == (6, 2, 8)
    assert options.intermediate_size == 80
    assert found.get("taps") == ("2,4,5" if kind in ("eagle3", "fused") else None)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_what_was_said_goes_before_what_the_target_says(kind):
    found = fitted_options(kind, {"num_attention_heads": 4, "tied": False, "head_dim": None}, TARGET)
    assert (found["num_attention_heads"], found["tied"], found["head_dim"]) == (4, False, 8)
    assert fitted_options("eagle3", {"taps": "1"}, TARGET)["taps"] == "1"


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("target", [None, GPT2Config(n_embd=48, n_head=6, n_layer=3)], ids=["none", "gpt2"])
def test_options_fit_any_target(kind, target):
    options_of(kind, fitted_options(kind, {}, target)).filled(48)
    found = fitted_options("eagle3", {}, target)
    assert ("taps" in found) == (target is not None)
