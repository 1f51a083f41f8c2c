"""What is registered stands in for the model's own functions and calls them, unless there is a tree."""

import pytest
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from medusa_spec.delegation import PREFIX, TREE_ARGUMENT, attach, register
from medusa_spec.errors import AttachError


def give_back(originals):
    for config, name in originals:
        config._attn_implementation_internal = name


def test_every_config_of_a_model_is_pointed_at_the_delegate(any_model):
    name = any_model.config._attn_implementation
    originals = attach(any_model)
    assert originals and all(original == name for _, original in originals)
    assert all(config._attn_implementation == PREFIX + name for config, _ in originals)
    give_back(originals)
    assert any_model.config._attn_implementation == name


def test_a_name_that_a_config_brought_along_is_not_prefixed_twice(llama):
    first = attach(llama)
    assert attach(llama) == first


def test_masks_are_made_by_the_original(llama):
    register("sdpa")
    arguments = {"batch_size": 1, "q_length": 3, "kv_length": 5, "q_offset": 2, "allow_is_causal_skip": False}
    masks = AttentionMaskInterface()
    assert torch.equal(masks[PREFIX + "sdpa"](**arguments), masks["sdpa"](**arguments))


def test_only_a_tree_takes_another_way(llama, prompt):
    taken = []

    class Mark:
        def attend(self, module, query, key, value, mask=None, **kwargs):
            taken.append(self)
            return query.transpose(1, 2), None

    before = llama(prompt(5)).logits
    originals = attach(llama)
    assert torch.equal(llama(prompt(5)).logits, before)
    assert not taken
    mark = Mark()
    llama(prompt(5), **{TREE_ARGUMENT: mark})
    assert taken == [mark] * llama.config.num_hidden_layers
    give_back(originals)


def test_registering_twice_keeps_the_first():
    register("sdpa")
    first = AttentionInterface._global_mapping[PREFIX + "sdpa"]
    register("sdpa")
    assert AttentionInterface._global_mapping[PREFIX + "sdpa"] is first


def test_a_module_outside_the_attention_interface_is_an_error():
    register("sdpa")
    with pytest.raises(AttachError, match="outside transformers' attention interface"):
        AttentionInterface._global_mapping[PREFIX + "sdpa"](nn.Identity(), torch.zeros(1, 1, 1, 1))
