"""Medusa heads are written under the names that engines ask for."""

import pytest
import torch

from medusa_spec.errors import UnsupportedError
from medusa_spec.formats.medusa_export import original_medusa, proposer_medusa, universal_medusa

H, V, K = 32, 128, 3
DRAFT = torch.tensor([1, 5, 9, 70, 127])


def blocks(layers: int = 1) -> dict[str, tuple[int, ...]]:
    names = [f"{k}.{layer}.linear" for k in range(K) for layer in range(layers)]
    return {f"{name}.weight": (H, H) for name in names} | {f"{name}.bias": (H,) for name in names}


def shapes(exported) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in exported.tensors.items()}


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("draft", [None, DRAFT])
def test_the_universal_folder_holds_one_lm_head_under_the_first_heads_name(layers, draft, random_heads, target) -> None:
    heads = random_heads(num_layers=layers, draft=draft)
    exported = universal_medusa(heads, target)
    assert shapes(exported) == blocks(layers) | {f"0.{layers}.weight": (V, H)}
    assert torch.equal(exported.tensors["2.0.linear.bias"], heads.heads[2].blocks[0].linear.bias)
    assert exported.file == "medusa_lm_head.safetensors" and exported.same_guesses


def test_the_config_is_what_vllm_and_tgi_ask_for_and_no_more(random_heads, target) -> None:
    """`architectures` or `model_type` would make TGI take it for no Medusa heads."""
    assert universal_medusa(random_heads(), target).config == {
        "medusa_num_heads": K,
        "medusa_num_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "hidden_size": H,
        "vocab_size": V,
    }


@pytest.mark.parametrize("lm_head", ["own", "low_rank"])
def test_heads_that_differ_have_an_lm_head_each(lm_head, random_heads, target) -> None:
    exported = universal_medusa(random_heads(lm_head=lm_head, rank=3), target)
    assert shapes(exported) == blocks() | {f"{k}.1.weight": (V, H) for k in range(K)}
    assert exported.config["original_lm_head"] is False


@pytest.mark.parametrize("lm_head", ["shared", "own", "low_rank"])
def test_the_authors_layout_has_an_lm_head_for_every_head(lm_head, random_heads, target) -> None:
    exported = original_medusa(random_heads(lm_head=lm_head, num_layers=2, rank=3), target)
    assert shapes(exported) == blocks(2) | {f"{k}.2.weight": (V, H) for k in range(K)}
    assert exported.config["original_lm_head"] is False


def test_what_other_engines_do_differently_is_told(random_heads, target) -> None:
    assert universal_medusa(random_heads(), target).notes == ()
    cut = " ".join(universal_medusa(random_heads(draft=DRAFT), target).notes)
    assert "draft vocabulary of 5 tokens is kept" in cut and "TGI" in cut
    assert "one block per head" in " ".join(universal_medusa(random_heads(num_layers=2), target).notes)
    assert "TGI" not in " ".join(original_medusa(random_heads(draft=DRAFT, num_layers=2), target).notes)


@pytest.mark.parametrize("writer", [universal_medusa, original_medusa, proposer_medusa])
def test_what_cannot_be_carried_is_refused(writer, random_heads, target) -> None:
    with pytest.raises(UnsupportedError, match="biases of LM heads"):
        writer(random_heads(lm_head="own", lm_head_bias=True), target)


@pytest.mark.parametrize("draft", [None, DRAFT])
@pytest.mark.parametrize("lm_head", ["shared", "own"])
def test_a_class_brings_only_the_rows_of_the_draft_vocabulary(lm_head, draft, random_heads, target) -> None:
    exported = proposer_medusa(random_heads(lm_head=lm_head, draft=draft), target)
    rows = V if draft is None else len(draft)
    names = ["lm_head.weight"] if lm_head == "shared" else [f"lm_heads.{k}.weight" for k in range(K)]
    expected = {
        name.replace(".0.linear.", ".layers.0.").join(["blocks.", ""]): shape for name, shape in blocks().items()
    }
    expected |= dict.fromkeys(names, (rows, H)) | ({} if draft is None else {"token_map": (rows,)})
    assert shapes(exported) == expected
    assert exported.config["target_lm_head"] == (lm_head == "shared" and draft is None)
    assert exported.config.get("truncated_vocab_size", V) == rows
    assert exported.beside["vllm_proposer.py"].is_file()
