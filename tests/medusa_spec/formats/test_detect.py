"""The format follows from the names of the tensors."""

import pytest

from medusa_spec.errors import CheckpointError, UnsupportedError
from medusa_spec.formats.detect import layout_of

BLOCK = ("weight", "bias")
LAYER = (
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "post_attention_layernorm.weight",
)
TENSORS = {
    "Medusa": [*(f"0.0.linear.{part}" for part in BLOCK), "0.1.weight"],
    "Medusa, version 2": [f"0.0.linear.{part}" for part in BLOCK],
    "Medusa full model": [*(f"medusa_head.0.0.linear.{part}" for part in BLOCK), "medusa_head.0.1.weight"],
    "ModelOpt Medusa": [*(f"medusa_heads.0.0.linear.{part}" for part in BLOCK), "medusa_heads.0.1.weight"],
    "vLLM Medusa": ["blocks.0.layers.0.weight", "lm_heads.0.weight"],
    "TensorRT-LLM Medusa": [
        *(f"medusa_heads.0.medusa_layers.0.linear.{part}" for part in BLOCK),
        "medusa_heads.0.lm_head.weight",
    ],
    "Hydra": [
        f"hydra_{module}.{part}"
        for module in ("mlp.0.0.linear", "mlp.0.0.res_connection", "lm_head.0")
        for part in BLOCK
    ],
    "EAGLE": ["fc.weight", *(f"layers.0.{name}" for name in LAYER)],
    "EAGLE-3": [
        *("fc.weight", "norm.weight", "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"),
        *(f"midlayer.{name}" for name in LAYER),
    ],
    "MLP speculator": [
        *(f"speculator.{part}.0.weight" for part in ("emb", "proj", "ln", "head")),
        "speculator.ln.0.bias",
    ],
}


@pytest.mark.parametrize("format", list(TENSORS))
def test_a_format_is_found_by_its_tensors_alone(format, names):
    assert layout_of(names(*TENSORS[format])).format == format


@pytest.mark.parametrize("format", list(TENSORS))
def test_a_config_of_another_format_changes_nothing(format, names):
    config = {"model_type": "medusa", "architectures": ["EagleLlama"], "hydra_head_arch": "mlp", "version": "1"}
    assert layout_of(names(*TENSORS[format], **config)).format == format


def test_heads_in_a_model_with_layers_of_another_family_are_found(names):
    model = ["model.layers.0.mlp.up_proj.weight", "model.mtp_layers.0.input_proj.weight"]
    assert layout_of(names(*TENSORS["Medusa full model"], *model)).with_target


def test_other_draft_models_are_refused_by_name(names):
    with pytest.raises(UnsupportedError, match="EAGLE"):
        layout_of(names("fc.weight", "fusion.mlp.up_proj.weight"))
    with pytest.raises(UnsupportedError, match="speculators"):
        layout_of(names(*TENSORS["Medusa"], speculators_model_type="dflash"))


def test_what_holds_no_heads_is_named(names):
    with pytest.raises(CheckpointError, match=r"no heads of a known format: its tensors are \['a\.weight'\]"):
        layout_of(names("a.weight"))
    with pytest.raises(CheckpointError, match="heads of this library without their medusa_config"):
        layout_of(names("heads.0.blocks.0.linear.weight"))
