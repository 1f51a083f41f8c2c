"""What is read from a foreign folder is what one of this library's own would hold."""

import json

import pytest
import torch

from medusa_spec.backbone import Backbone
from medusa_spec.checkpoint import load_heads
from medusa_spec.errors import CheckpointError
from medusa_spec.formats.convert import foreign_target, read_foreign
from medusa_spec.testing import tiny

H, V = 32, 128
MEDUSA = {"0.0.linear.weight": (H, H), "0.0.linear.bias": (H,), "0.1.weight": (V, H)}
VLLM = {"blocks.0.layers.0.weight": (H, H), "lm_heads.0.weight": (V, H)}


@pytest.mark.parametrize("shapes", [MEDUSA, VLLM], ids=["medusa", "vllm"])
def test_the_state_is_that_of_our_own_heads(shapes, randoms, write, target, load):
    folder = write(randoms(shapes), {"base_model_name_or_path": "org/base"})
    config, state = read_foreign(folder, target)
    own = load(folder).state_dict()
    assert {name: tensor.shape for name, tensor in state.items()} == {name: t.shape for name, t in own.items()}
    assert config.base_model_name_or_path == "org/base" and config.lm_head_hash is None
    assert config.tree is None and config.values is None and "Medusa" in config.training["format"]
    json.dumps(config.to_dict())


def test_missing_biases_are_zero(randoms, write, target):
    _, state = read_foreign(write(randoms(VLLM)), target)
    assert not state["heads.0.blocks.0.linear.bias"].any()


@pytest.mark.parametrize("config", [None, {}, {"base_model_name_or_path": None}, {"base_model_name_or_path": "org/b"}])
def test_the_target_is_named_by_the_config_or_not_at_all(config, randoms, write):
    name = (config or {}).get("base_model_name_or_path")
    assert foreign_target(write(randoms(MEDUSA), config)) == (name, False)
    inside = {f"medusa_head.{key}": shape for key, shape in MEDUSA.items()} | {"model.norm.weight": (H,)}
    folder = write(randoms(inside), config)
    assert foreign_target(folder) == (name, True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int32], ids=str)
def test_quantised_tensors_are_refused(dtype, randoms, write, target):
    tensors = randoms(MEDUSA) | {"0.0.linear.weight": torch.ones(H, H).to(dtype)}
    with pytest.raises(CheckpointError, match=rf"floating-point numbers of 16 bits or more, got {dtype}"):
        read_foreign(write(tensors), target)


def test_a_soft_cap_of_the_target_leaves_the_order_of_guesses(randoms, write):
    backbone = Backbone(tiny("gemma2"))
    assert backbone.projection().softcap is not None
    tensors = randoms(MEDUSA)
    heads, _ = load_heads(write(tensors), backbone)
    h = torch.randn(5, H, dtype=torch.float64)
    z = h + torch.nn.functional.silu(h @ tensors["0.0.linear.weight"].T + tensors["0.0.linear.bias"])
    assert torch.equal(heads(h)[0].argsort(), (z @ tensors["0.1.weight"].T).argsort())


def test_an_lm_head_of_one_for_all_is_kept_where_the_target_has_biases(randoms, write):
    model = tiny("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.randn(V, dtype=torch.float64))
    one = {"lm_head.weight": model.lm_head.weight.detach().clone(), "blocks.0.layers.0.weight": torch.ones(H, H)}
    config, _ = read_foreign(write(one), Backbone(model))
    assert config.heads.lm_head == "own" and config.heads.lm_head_bias is False
