"""Adapters that change weights are part of the target; changes of theirs are seen, prompts that they learn refused."""

import pytest
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from medusa_spec.adapters import adapter_state, without_wrapper
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
