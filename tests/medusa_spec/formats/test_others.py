"""Draft models that are not read are refused by the name of their family, whatever is in their config."""

import pytest

from medusa_spec.errors import UnsupportedError
from medusa_spec.formats.others import refuse_by_config, refuse_by_names

LAYER = ("self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.gate_proj.weight")
FAMILIES = {
    "eagle-1-speculators": ["fusion_fc.weight", *(f"transformer.{name}" for name in LAYER)],
    "eagle-without-layer": ["embed_tokens.weight", "fc.weight"],
    "eagle-3-parallel": ["lm_head.weight", "parallel_draft_heads.0.medusa_layers.0.linear.weight"],
    "mtp": ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"],
    "mtp-mimo": ["model.layers.0.mlp.up_proj.weight", "model.mtp_layers.0.input_proj.weight"],
    "mtp-deepseek": ["model.layers.61.eh_proj.weight", "model.layers.61.enorm.weight"],
    "mlp-speculator-of-gates": ["speculator.forget_emb.0.weight", "speculator.cell_ln.0.bias"],
    "mlp-speculator-bare": ["head.0.weight", "ln.1.weight"],
}
NAMED = {"eagle": "EAGLE", "mtp": r"MTP \(multi-token prediction\)", "mlp": "MLP speculator"}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_family_is_refused_by_name(family, names):
    named = NAMED[family.split("-")[0]]
    with pytest.raises(
        UnsupportedError, match=f"holds {named} weights .* does not support yet; use heads of a kind that is"
    ):
        refuse_by_names(names(*FAMILIES[family]))


def test_what_is_none_of_them_passes(names):
    refuse_by_names(names("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"))
    refuse_by_config(names("fc.weight", model_type="llama"))
    refuse_by_config(names("fc.weight", speculators_model_type="eagle3"))


@pytest.mark.parametrize("family", ["eagle", "mtp", "dflash", "peagle"])
def test_a_checkpoint_of_speculators_is_refused_by_its_config(family, names):
    with pytest.raises(UnsupportedError, match=f"a {family} draft model in the format of `speculators`"):
        refuse_by_config(names("layers.0.mlp.up_proj.weight", speculators_model_type=family))
