"""Heads under vLLM's names give the logits that vLLM computes, and what it drops in silence is said."""

import warnings

import pytest
import torch

from medusa_spec.backbone import Backbone
from medusa_spec.checkpoint import load_heads
from medusa_spec.errors import CheckpointError
from medusa_spec.formats.vllm import vllm_layout
from medusa_spec.testing import tiny

H, V, K = 32, 128, 2
TOKEN_MAP = torch.tensor([70, 5, 127, 0, 33, 9])
CONFIG = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": H, "vocab_size": V, "num_heads": K}


def shapes(*, layers=1, bias=False, rows=V, lm_heads="each", prefix=""):
    found = {}
    for i in range(K):
        for j in range(layers):
            found[f"{prefix}blocks.{i}.layers.{j}.weight"] = (H, H)
            if bias:
                found[f"{prefix}blocks.{i}.layers.{j}.bias"] = (H,)
        if lm_heads == "each":
            found[f"{prefix}lm_heads.{i}.weight"] = (rows, H)
    return found


def reference(tensors, h, *, layers=1, lm_head=None, scale=1.0, prefix=""):
    """What vLLM computes: logits of the rows that the LM heads have."""
    logits = []
    for i in range(K):
        z = h
        for j in range(layers):
            bias = tensors.get(f"{prefix}blocks.{i}.layers.{j}.bias", torch.zeros(H, dtype=h.dtype))
            z = z + torch.nn.functional.silu(z @ tensors[f"{prefix}blocks.{i}.layers.{j}.weight"].T + bias)
        head = tensors[f"{prefix}lm_heads.{i}.weight"] if lm_head is None else lm_head
        logits.append(scale * (z @ head.T))
    return torch.stack(logits)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_heads_give_their_own_logits(layers, bias, prefix, randoms, write, load):
    tensors = randoms(shapes(layers=layers, bias=bias, prefix=prefix))
    heads = load(write(tensors, CONFIG | {"num_hidden_layers": layers, "medusa_fc_bias": bias}))
    h = torch.randn(5, H, dtype=torch.float64)
    torch.testing.assert_close(heads(h), reference(tensors, h, layers=layers, prefix=prefix))


def test_biases_that_the_config_does_not_know_are_used_and_said(randoms, write, load):
    tensors = randoms(shapes(bias=True))
    folder = write(tensors, CONFIG)
    with pytest.warns(UserWarning, match="medusa_fc_bias = None, the file holds biases; they are used here"):
        heads = load(folder)
    h = torch.randn(5, H, dtype=torch.float64)
    torch.testing.assert_close(heads(h), reference(tensors, h))


def test_biases_that_the_config_promises_must_be_there(randoms, write, load):
    folder = write(randoms(shapes()), CONFIG | {"medusa_fc_bias": True})
    with pytest.raises(CheckpointError, match=r"must hold 6 tensors, got 4: missing \['blocks\.0\.layers\.0\.bias'"):
        load(folder)


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
@pytest.mark.parametrize(("same", "kind"), [(True, "shared"), (False, "own")])
def test_one_lm_head_is_all_heads(same, kind, name, randoms, write, load, target):
    tensors = randoms(shapes(lm_heads="one"))
    lm_head = target.lm_head.weight.clone() if same else torch.randn(V, H, dtype=torch.float64)
    heads = load(write(tensors | {name: lm_head}, CONFIG | {"original_lm_head": True}))
    h = torch.randn(5, H, dtype=torch.float64)
    torch.testing.assert_close(heads(h), reference(tensors, h, lm_head=lm_head))
    assert heads.config.lm_head == kind


def test_a_copy_of_the_targets_lm_head_is_known_after_rounding(randoms, write, load, target):
    lm_head = target.lm_head.weight.bfloat16()
    heads = load(write(randoms(shapes(lm_heads="one")) | {"lm_head.weight": lm_head}, CONFIG))
    assert heads.config.lm_head == "shared"


@pytest.mark.parametrize("rows", [len(TOKEN_MAP), V], ids=["cut", "whole"])
def test_a_token_map_becomes_the_draft_vocabulary_in_rising_order(rows, randoms, write, load):
    tensors = randoms(shapes(rows=rows))
    folder = write(tensors | {"token_map": TOKEN_MAP}, CONFIG | {"truncated_vocab_size": len(TOKEN_MAP)})
    heads = load(folder)
    assert heads.draft_ids.tolist() == sorted(TOKEN_MAP.tolist())
    h = torch.randn(5, H, dtype=torch.float64)
    theirs = torch.full((K, 5, V), -torch.inf, dtype=torch.float64)
    raw = reference(tensors, h)
    theirs[..., TOKEN_MAP] = raw if rows == len(TOKEN_MAP) else raw[..., TOKEN_MAP]
    ours = torch.full_like(theirs, -torch.inf)
    ours[..., heads.draft_ids] = heads(h)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("rows", [len(TOKEN_MAP), V], ids=["cut", "whole"])
def test_a_token_map_goes_with_the_targets_lm_head(rows, randoms, write, load, target):
    whole = target.lm_head.weight.detach()
    lm_head = whole.clone() if rows == V else whole[TOKEN_MAP]
    tensors = randoms(shapes(lm_heads="one"))
    folder = write(tensors | {"lm_head.weight": lm_head, "token_map": TOKEN_MAP}, CONFIG | {"original_lm_head": True})
    heads = load(folder)
    assert heads.config.lm_head == "shared" and heads.config.draft_vocab_size == len(TOKEN_MAP)
    h = torch.randn(5, H, dtype=torch.float64)
    torch.testing.assert_close(heads(h), reference(tensors, h, lm_head=whole)[..., TOKEN_MAP.sort().values])


def test_a_token_map_of_another_size_than_the_config_says_is_a_warning(randoms, write, load):
    tensors = randoms(shapes(rows=len(TOKEN_MAP))) | {"token_map": TOKEN_MAP}
    folder = write(tensors, CONFIG | {"truncated_vocab_size": 64})
    with pytest.warns(UserWarning, match="truncated_vocab_size = 64, token_map holds 6"):
        load(folder)


def test_a_cut_vocabulary_without_its_map_is_refused(randoms, write, load):
    folder = write(randoms(shapes(rows=64)), CONFIG | {"truncated_vocab_size": 64})
    with pytest.raises(CheckpointError, match=r"must hold token_map, the ids of the 64 tokens .* \(of 128\)"):
        load(folder)


@pytest.mark.parametrize("config", [{}, {"original_lm_head": True}])
def test_heads_without_any_lm_head_are_refused(config, randoms, write, load):
    folder = write(randoms(shapes(lm_heads="none")), CONFIG | config)
    with pytest.raises(CheckpointError, match=r"missing \['lm_head\.weight'\]"):
        load(folder)


@pytest.mark.parametrize("scale", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("target_scale", [1.0, 0.25])
def test_a_logit_scale_scales_own_lm_heads_whatever_the_targets_is(target_scale, scale, randoms, write):
    tensors = randoms(shapes())
    model = tiny("llama")
    backbone = Backbone(model)
    if target_scale != 1.0:
        backbone._post_processing = lambda: (target_scale, None)  # as a Cohere or Granite target has it
    heads, _ = load_heads(write(tensors, CONFIG | {"logit_scale": scale}), backbone)
    h = torch.randn(5, H, dtype=torch.float64)
    torch.testing.assert_close(heads(h), reference(tensors, h, scale=scale))


@pytest.mark.parametrize("scale", [0, -1.0, "1.0", True])
def test_a_logit_scale_that_turns_the_order_is_refused(scale, randoms, write, load):
    with pytest.raises(CheckpointError, match=f"logit_scale must be a number above 0, got {scale!r}"):
        load(write(randoms(shapes()), CONFIG | {"logit_scale": scale}))


@pytest.mark.parametrize(("key", "said"), [("num_heads", 5), ("num_hidden_layers", 2), ("medusa_num_heads", 1)])
def test_a_config_that_counts_otherwise_is_not_believed(key, said, randoms, write, load):
    folder = write(randoms(shapes()), CONFIG | {key: said})
    with pytest.warns(UserWarning, match=f"{key} = {said}"):
        assert load(folder).config.num_heads == K


def test_tensors_that_vllm_ignores_are_surplus(randoms, write, load):
    with pytest.raises(CheckpointError, match=r"must hold 4 tensors, got 5: .* surplus \['lm_heads\.7\.weight'\]"):
        load(write(randoms(shapes() | {"lm_heads.7.weight": (V, H)}), CONFIG))


def test_the_format_is_named_by_its_tensors(names):
    layout = vllm_layout(names(*shapes(layers=2), **CONFIG))
    assert layout.format == "vLLM Medusa" and (layout.num_heads, layout.num_layers) == (K, 2)
    assert vllm_layout(names("0.0.linear.weight", "model.blocks.0.layers.0.weight")) is None


def test_heads_decode_by_the_public_call(randoms, write, decodes):
    tensors = randoms(shapes(rows=len(TOKEN_MAP))) | {"token_map": TOKEN_MAP}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = decodes(write(tensors, CONFIG | {"truncated_vocab_size": len(TOKEN_MAP)}))
    assert model.heads.config.draft_vocab_size == len(TOKEN_MAP)
