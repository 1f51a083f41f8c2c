"""Adapters that change weights are part of the target; changes of theirs are seen, prompts that they learn refused."""

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn

from medusa_spec.adapters import (
    active_adapters,
    active_part,
    adapted_layers,
    adapter_state,
    merged_copy,
    without_wrapper,
)
from medusa_spec.errors import UnsupportedError


@pytest.fixture
def adapted(llama):
    return get_peft_model(llama, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


def test_a_peft_model_is_taken_as_the_model_inside(llama, adapted):
    assert without_wrapper(adapted) is llama
    assert without_wrapper(llama) is llama


def test_adapters_that_learn_prompts_are_refused(llama):
    prompts = get_peft_model(llama, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(UnsupportedError, match="virtual tokens"):
        without_wrapper(prompts)


def test_a_model_without_adapters_has_an_empty_state(llama):
    assert adapter_state(llama) == ()


def test_every_change_of_the_adapters_is_a_change_of_the_state(llama, adapted):
    at_first = adapter_state(llama)
    assert at_first and at_first == adapter_state(llama)
    with adapted.disable_adapter():
        assert adapter_state(llama) != at_first
    assert adapter_state(llama) == at_first
    adapted.merge_adapter()
    assert adapter_state(llama) != at_first
    adapted.unmerge_adapter()
    assert adapter_state(llama) == at_first
    adapted.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.set_adapter("other")
    assert adapter_state(llama) != at_first


def test_the_active_adapters_are_named(llama, adapted):
    assert active_adapters(llama) == ["default"]
    adapted.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.set_adapter("other")
    assert active_adapters(llama) == ["other"]
    with adapted.disable_adapter():
        assert active_adapters(llama) == []


def test_a_merged_copy_is_plain_and_computes_what_the_adapted_model_does(llama, adapted):
    ids, before = torch.arange(2, 12)[None], {name: t.clone() for name, t in llama.state_dict().items()}
    on = llama(ids).logits
    merged = merged_copy(llama)
    assert not adapted_layers(merged) and adapted_layers(llama)
    torch.testing.assert_close(merged(ids).logits, on)
    with adapted.disable_adapter():
        off = llama(ids).logits
        assert torch.equal(merged_copy(llama)(ids).logits, off)
    assert not torch.allclose(on, off)
    adapted.merge_adapter()
    assert torch.equal(merged_copy(llama)(ids).logits, llama(ids).logits)
    adapted.unmerge_adapter()
    after = llama.state_dict()
    torch.testing.assert_close(after, before)


def test_a_merged_copy_shares_what_no_adapter_touches_and_a_plain_model_whole(llama, adapted):
    merged = merged_copy(llama)
    assert merged.get_input_embeddings().weight is llama.get_input_embeddings().weight
    assert merged_copy(merged) is merged


def test_the_part_of_the_active_adapter_is_found():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "note": nn.Linear(1, 1)})
    assert active_part(model["note"], model) is model["note"]
    peft = get_peft_model(model, LoraConfig(r=1, target_modules=["a"], modules_to_save=["note"]))
    assert active_part(model["note"], model) is model["note"].modules_to_save["default"]
    peft.add_adapter("without", LoraConfig(r=1, target_modules=["a"]))
    peft.set_adapter("without")
    assert active_part(model["note"], model) is model["note"].original_module
