"""What an adapter says is heard while it is active, or when it was merged for good; weights have a name."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel

from medusa_spec import MedusaModel
from medusa_spec.finetune.lora import adapt_heads
from medusa_spec.head_adapters import delete, save_adapter
from medusa_spec.heads import DraftHeads
from medusa_spec.heads_note import note_of, weights_hash
from medusa_spec.testing import tiny_model
from medusa_spec.tree import TreeTemplate


@pytest.fixture
def heads() -> DraftHeads:
    """Random Medusa heads."""
    model = MedusaModel(tiny_model(), probe=False)
    model.detach()
    for parameter in model.heads.parameters():
        parameter.data = torch.randn_like(parameter).bfloat16().double()
    return model.heads


@pytest.fixture
def folder(heads: DraftHeads, tmp_path: Path) -> Path:
    """An adapter of them with a tree."""
    adapt_heads(heads, rank=2, alpha=4.0, seed=0)
    for name, parameter in heads.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    config = MedusaModel(tiny_model(), heads, probe=False).medusa_config
    tree = TreeTemplate(paths=((0,), (1,)))
    save_adapter(tmp_path, heads, replace(config, tree=tree, base_heads="b", base_heads_hash=weights_hash(heads)))
    delete(heads, "default")
    return tmp_path


def test_heads_alone_say_nothing(heads: DraftHeads) -> None:
    assert note_of(heads) is None


def test_it_is_heard_while_it_is_active(heads: DraftHeads, folder: Path) -> None:
    peft = PeftModel.from_pretrained(heads, folder)
    assert note_of(heads).tree.paths == ((0,), (1,))
    with peft.disable_adapter():
        assert note_of(heads) is None


def test_it_is_heard_on_when_it_was_merged_for_good_and_not_when_it_was_unloaded(
    heads: DraftHeads, folder: Path
) -> None:
    PeftModel.from_pretrained(heads, folder).unload()
    assert note_of(heads) is None
    PeftModel.from_pretrained(heads, folder).merge_and_unload()
    assert note_of(heads).tree.paths == ((0,), (1,))


def test_an_adapter_added_from_outside_is_heard(heads: DraftHeads, folder: Path) -> None:
    from peft import inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=1, target_modules=["linear"]), heads, "first")
    assert note_of(heads) is None
    with pytest.warns(UserWarning):
        PeftModel.from_pretrained(heads, folder, adapter_name="second")
    assert note_of(heads).base_heads == "b"


def test_the_hash_names_the_weights_whatever_dtype_and_adapters(heads: DraftHeads) -> None:
    first = weights_hash(heads)
    adapt_heads(heads, rank=2, alpha=4.0, seed=0)
    assert weights_hash(heads) == first
    delete(heads, "default")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert weights_hash(heads.to(dtype)) == first
    with torch.no_grad():
        heads.heads[0].blocks[0].linear.bias[0] += 1
    assert weights_hash(heads) != first
