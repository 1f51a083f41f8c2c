"""Attaching changes nothing that anyone else sees."""

import copy
import gc
import pickle
import threading

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AttentionInterface, AutoModel

from medusa_spec import MedusaModel
from medusa_spec.attention import TreePass
from medusa_spec.backbone import Backbone
from medusa_spec.cache import SlabCache
from medusa_spec.errors import AttachError, ConfigError, UnsupportedError
from medusa_spec.tree import chain, shape_of


def padded_batch(prompt):
    """Two rows, the second left-padded by four."""
    ids = torch.cat([prompt(13, 1), prompt(13, 2)])
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    ids[1, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def test_plain_calls_of_an_attached_model_are_bit_equal(any_model, prompt):
    batch = padded_batch(prompt)
    before = any_model(**batch).logits
    generated = any_model.generate(**batch, max_new_tokens=12, do_sample=False)
    backbone = Backbone(any_model)
    # (Rows of padding alone are nan in some models' eager attention, before and after.)
    same = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(any_model(**batch).logits, before, **same)
    assert torch.equal(any_model.generate(**batch, max_new_tokens=12, do_sample=False), generated)
    backbone.detach()
    torch.testing.assert_close(any_model(**batch).logits, before, **same)


def test_detach_leaves_no_trace(any_model):
    name = any_model.config._attn_implementation
    hooks = dict(any_model.get_output_embeddings()._forward_pre_hooks)
    backbone = Backbone(any_model)
    assert any_model.config._attn_implementation != name
    backbone.detach()
    backbone.detach()
    assert any_model.config._attn_implementation == name
    assert dict(any_model.get_output_embeddings()._forward_pre_hooks) == hooks
    assert not backbone.attached
    Backbone(any_model).detach()  # and it can be wrapped again


def test_wrapping_twice_is_an_error(llama):
    backbone = Backbone(llama)
    with pytest.raises(AttachError, match="already wrapped"):
        Backbone(llama)
    backbone.detach()


def test_a_padded_plain_generate_beside_tree_decoding_gives_what_the_untouched_model_gives(
    make_model, scripted, prompt
):
    for name in ("llama", "gemma3"):
        model = make_model(name)
        batch, ids = padded_batch(prompt), prompt(10)
        expected = model.generate(**batch, max_new_tokens=20, do_sample=False)
        answer = model.generate(ids, max_new_tokens=60, do_sample=False)
        wrapped = MedusaModel(model, drafter=scripted(answer[0].tolist(), right=0.7), probe=False)
        stop, plain, trees = threading.Event(), [], []

        def decode_trees(wrapped=wrapped, ids=ids, stop=stop, trees=trees):
            while not stop.is_set():
                trees.append(wrapped.generate(ids, max_new_tokens=60, do_sample=False))

        thread = threading.Thread(target=decode_trees)
        thread.start()
        try:
            for _ in range(4):
                plain.append(model.generate(**batch, max_new_tokens=20, do_sample=False))
        finally:
            stop.set()
            thread.join()
        assert trees and all(torch.equal(out, answer) for out in trees)
        assert all(torch.equal(out, expected) for out in plain)
        wrapped.detach()


def test_h_is_the_tensor_that_enters_the_lm_head(any_model, prompt):
    backbone = Backbone(any_model)
    ids = prompt(8)
    out = backbone.forward(ids)
    assert out.h.shape == (1, 8, backbone.hidden_size)
    assert torch.equal(backbone.hidden_states(ids), out.h)
    torch.testing.assert_close(backbone.projection()(out.h), out.logits, rtol=1e-5, atol=1e-5)
    last = backbone.forward(ids, last_only=True)
    torch.testing.assert_close(last.h, out.h[:, -1:])
    torch.testing.assert_close(last.logits, out.logits[:, -1:])


def test_hidden_states_ignore_padding_on_the_right(any_model, prompt):
    backbone = Backbone(any_model)
    ids = prompt(9)
    padded = torch.cat([ids, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    mask = (torch.arange(13) < 9).long()[None]
    torch.testing.assert_close(backbone.hidden_states(padded, mask)[:, :9], backbone.hidden_states(ids))


def test_a_scale_of_the_logits_is_found(llama, prompt):
    head = llama.get_output_embeddings()
    handle = llama.register_forward_hook(lambda module, args, out: setattr(out, "logits", out.logits * 0.25) or out)
    projection = Backbone(llama).projection()
    assert projection.scale == pytest.approx(0.25)
    assert projection.softcap is None
    assert projection.weight.data_ptr() == head.weight.data_ptr()
    handle.remove()


def test_a_soft_cap_of_the_logits_is_found(make_model):
    assert Backbone(make_model("gemma2")).projection().softcap == 30.0


def test_another_lm_head_has_another_hash(make_model):
    one, two = Backbone(make_model("llama")), Backbone(make_model("llama", seed=1))
    assert one.lm_head_hash() == Backbone(make_model("llama")).lm_head_hash()
    assert one.lm_head_hash() != two.lm_head_hash()


def test_a_model_without_lm_head_is_refused(llama):
    with pytest.raises(UnsupportedError, match="LM head"):
        Backbone(AutoModel.from_config(llama.config))


def test_what_is_no_model_is_refused():
    with pytest.raises(UnsupportedError, match="PreTrainedModel"):
        Backbone(torch.nn.Linear(2, 2))


def test_lora_on_the_target_is_part_of_the_target(llama, scripted, prompt):
    adapted = get_peft_model(llama, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted = adapted.double().eval()
    ids = prompt(9)
    answer = adapted.generate(input_ids=ids, max_new_tokens=20, do_sample=False)
    model = MedusaModel(adapted, drafter=scripted(answer[0].tolist(), right=0.8))
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), answer)
    assert model.last_stats.accepted > 0
    with adapted.disable_adapter(), pytest.raises(AttachError, match="adapters"):
        model.generate(ids, max_new_tokens=4)
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), answer)


def test_a_detached_model_says_so(llama, prompt):
    model = MedusaModel(llama, probe=False)
    model.detach()
    with pytest.raises(AttachError, match="detached"):
        model.generate(prompt(4), max_new_tokens=2)


@pytest.mark.parametrize("rows", [136, 120])
def test_an_lm_head_of_other_rows_than_the_config_says_is_taken_as_it_is(llama, prompt, rows):
    llama.lm_head = torch.nn.Linear(32, rows).double()
    llama.lm_head.bias.data[128:] = -1e9  # ids beyond the embeddings cannot be read by the target itself
    ids = prompt(9) % 100
    answer = llama.generate(ids, do_sample=False, max_new_tokens=20)
    model = MedusaModel(llama)
    assert model.heads.config.vocab_size == model.backbone.vocab_size == rows
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=20), answer)


def test_an_exchanged_lm_head_is_noticed(llama, prompt):
    model = MedusaModel(llama, drafter="ngram", probe=False)
    llama.lm_head = torch.nn.Linear(32, 128, bias=False).double()
    with pytest.raises(AttachError, match="LM head .* exchanged"):
        model.generate(prompt(5), max_new_tokens=4)


def test_an_lm_head_that_is_never_called_is_an_error(llama, prompt, monkeypatch):
    other = torch.nn.Linear(32, 128).double()
    monkeypatch.setattr(type(llama), "get_output_embeddings", lambda self: other)
    with pytest.raises(AttachError, match="does not call the LM head"):
        Backbone(llama).forward(prompt(3))


def test_a_copy_of_an_attached_model_can_be_wrapped_and_the_original_is_left_alone(llama, scripted, prompt):
    ids = prompt(9)
    answer = llama.generate(ids, do_sample=False, max_new_tokens=20)
    model = MedusaModel(llama, drafter=scripted(answer[0].tolist(), right=0.8), probe=False)
    other = copy.deepcopy(llama)
    wrapped = MedusaModel(other, drafter=model.drafter)
    assert torch.equal(wrapped.generate(ids, do_sample=False, max_new_tokens=20), answer)
    wrapped.detach()
    assert other.config._attn_implementation == "sdpa" and not other.lm_head._forward_pre_hooks
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=20), answer)
    with pytest.raises(AttachError, match="already wrapped"):
        Backbone(llama)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_and_pickles_decode_and_detach_by_themselves(llama, prompt, monkeypatch, again):
    ids = prompt(9)
    model = MedusaModel(llama, probe=False)
    answer = model.generate(ids, do_sample=False, max_new_tokens=12)
    # In another process nothing is registered yet.
    monkeypatch.delitem(AttentionInterface._global_mapping, "medusa_spec.sdpa")
    other = again(model)
    with pytest.raises(AttachError, match="already wrapped"):
        Backbone(other.target)
    assert torch.equal(other.generate(ids, do_sample=False, max_new_tokens=12), answer)
    other.detach()
    assert other.target.config._attn_implementation == "sdpa" and not other.target.lm_head._forward_pre_hooks
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=12), answer)


@pytest.mark.parametrize("drafter", ["heads", "ngram"])
def test_offloaded_weights_are_read_where_they_are_computed_with(make_model, prompt, drafter):
    llama, ids = make_model("llama", dtype=torch.float32), prompt(9)
    answer = llama.generate(ids, do_sample=False, max_new_tokens=12)
    name = Backbone(llama)
    name.detach()
    accelerate.cpu_offload(llama, execution_device=torch.device("cpu"))
    assert llama.lm_head.weight.device.type == "meta"
    model = MedusaModel(llama, drafter=drafter)
    assert model.backbone.lm_head_hash() == name.lm_head_hash()
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=12), answer)
    assert llama.lm_head.weight.device.type == "meta"


def test_a_text_beyond_learnt_positions_is_named(make_model, prompt):
    backbone = Backbone(make_model("gpt2", max_position_embeddings=16))
    assert backbone.hidden_states(prompt(16)).shape == (1, 16, 32)
    with pytest.raises(ConfigError, match="at most 16, .* got a text of 17 tokens"):
        backbone.hidden_states(prompt(17))


def test_a_model_whose_wrapper_nobody_holds_can_be_wrapped_again(llama, scripted, prompt):
    ids = prompt(9)
    answer = llama.generate(ids, do_sample=False, max_new_tokens=20)
    MedusaModel(llama, drafter="ngram", probe=False)  # as in a cell that is run again
    gc.collect()
    model = MedusaModel(llama, drafter=scripted(answer[0].tolist(), right=0.8))
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=20), answer)
    model.detach()
    assert llama.config._attn_implementation == "sdpa" and not llama.lm_head._forward_pre_hooks


SHAPE = shape_of((-1, 0, 1, 0, 3, 2))


def listeners(model):
    """How many hooks stand on each module."""
    return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


def prompted(backbone, ids):
    cache = SlabCache(backbone.config)
    backbone.forward(ids, last_only=True, cache=cache)
    cache.seal(16)
    return cache


def verify(backbone, cache, shape, tokens, **arguments):
    cache.make_room(shape.size)
    return backbone.verify(tokens, TreePass(shape=shape, cache=cache, device=backbone.device), **arguments)


def test_taps_are_the_hidden_states_that_hugging_face_gives(any_model, prompt):
    batch = torch.cat([prompt(9, 1), prompt(9, 2)])
    padded = {"input_ids": batch, "attention_mask": (torch.arange(9) < torch.tensor([[9], [6]])).long()}
    reference = copy.deepcopy(any_model)
    expected, shorter = (
        torch.stack(reference(**inputs, output_hidden_states=True).hidden_states[:2], dim=2)
        for inputs in ({"input_ids": batch}, padded)
    )
    backbone = Backbone(any_model)
    assert torch.equal(backbone.forward(batch, taps=(0, 1)).layers, expected)
    assert torch.equal(backbone.forward(batch, taps=(1,)).layers, expected[:, :, 1:])
    assert torch.equal(backbone.states(batch, taps=(0, 1)).layers, expected)
    torch.testing.assert_close(backbone.states(**padded, taps=(0, 1)).layers, shorter, rtol=0, atol=0, equal_nan=True)


def test_taps_change_nothing_and_leave_nothing_behind(any_model, prompt):
    ids, backbone = prompt(9), Backbone(any_model)
    before = listeners(any_model)
    plain, tapped = backbone.forward(ids), backbone.forward(ids, taps=(0, 1))
    assert plain.layers is None
    assert torch.equal(tapped.logits, plain.logits) and torch.equal(tapped.h, plain.h)
    states = backbone.states(ids, taps=(1,))
    assert torch.equal(states.h, plain.h)
    assert backbone.states(ids).layers is None
    cache = prompted(backbone, ids)
    tree, with_taps = (
        verify(backbone, copy.deepcopy(cache), SHAPE, prompt(SHAPE.size, 1), taps=taps) for taps in ((), (0, 1))
    )
    assert torch.equal(with_taps.logits, tree.logits) and torch.equal(with_taps.h, tree.h)
    assert listeners(any_model) == before


def test_taps_of_a_tree_are_those_of_one_token_passes_over_each_path(any_model, prompt):
    backbone, tokens = Backbone(any_model), prompt(SHAPE.size, 1)
    sealed = prompted(backbone, prompt(11))
    out = verify(backbone, copy.deepcopy(sealed), SHAPE, tokens, taps=(0, 1))
    assert out.layers.shape == (1, SHAPE.size, 2, 32)
    for node in range(SHAPE.size):
        cache = copy.deepcopy(sealed)
        for place in SHAPE.path_to(node):
            alone = verify(backbone, cache, chain(0), tokens[:, place : place + 1], taps=(0, 1))
            cache.keep(0, (0,))
        torch.testing.assert_close(out.layers[0, node], alone.layers[0, 0])
        torch.testing.assert_close(out.h[0, node], alone.h[0, 0])


def test_states_of_all_positions_beside_the_last_logits_are_those_of_a_whole_pass(any_model, prompt):
    backbone, ids, tokens, rows = Backbone(any_model), prompt(9), prompt(SHAPE.size, 1), []
    whole = backbone.forward(ids, taps=(0, 1))
    backbone.forward(ids, last_only=True, all_states=True)  # has found out by now where h comes from
    handle = backbone.lm_head.register_forward_hook(lambda module, args, out: rows.append(out.shape[1]))
    both = backbone.forward(ids, last_only=True, all_states=True, taps=(0, 1))
    last = backbone.forward(ids, last_only=True, taps=(0, 1))
    handle.remove()
    assert rows == [1, 1]
    assert torch.equal(both.logits, last.logits) and last.logits.shape[1] == 1
    assert torch.equal(both.h, whole.h) and torch.equal(both.layers, whole.layers)
    assert torch.equal(last.h, whole.h[:, -1:]) and torch.equal(last.layers, whole.layers[:, -1:])
    cache = prompted(backbone, ids)
    tree, short = (
        verify(backbone, copy.deepcopy(cache), SHAPE, tokens, taps=(1,), **arguments)
        for arguments in ({}, {"last_only": True, "all_states": True})
    )
    assert short.logits.shape[1] == 1
    assert torch.equal(short.h, tree.h) and torch.equal(short.layers, tree.layers)


@pytest.mark.parametrize("keeps", [True, False])
def test_h_of_all_positions_is_right_where_the_decoder_does_not_give_it(llama, prompt, keeps):
    llama.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    backbone, ids = Backbone(llama), prompt(9)
    backbone._keeps_logits = keeps
    whole = backbone.forward(ids)
    both = backbone.forward(ids, last_only=True, all_states=True)
    assert torch.equal(whole.h, llama.model(ids).last_hidden_state * 3)
    assert torch.equal(both.h, whole.h) and torch.equal(both.logits, whole.logits[:, -1:])


def test_a_thread_that_taps_and_one_that_does_not_do_not_see_each_other(llama, prompt):
    backbone, one, two = Backbone(llama), prompt(9), prompt(7, 1)
    expected, plain = backbone.forward(one, taps=(0, 1)), backbone.forward(two)
    stop, others = threading.Event(), []

    def run():
        while not stop.is_set():
            others.append(backbone.forward(two))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        tapped = [backbone.forward(one, taps=(0, 1)) for _ in range(30)]
    finally:
        stop.set()
        thread.join()
    assert others and all(out.layers is None and torch.equal(out.h, plain.h) for out in others)
    assert all(torch.equal(out.layers, expected.layers) and torch.equal(out.h, expected.h) for out in tapped)


def test_a_copy_taps_its_own_layers(llama, prompt):
    model, ids = MedusaModel(llama, probe=False), prompt(9)
    expected = model.backbone.forward(ids, taps=(0, 1)).layers
    other = copy.deepcopy(model)
    with torch.no_grad():
        llama.model.layers[0].mlp.down_proj.weight.mul_(2)
    assert torch.equal(other.backbone.forward(ids, taps=(0, 1)).layers, expected)
    assert not torch.equal(model.backbone.forward(ids, taps=(0, 1)).layers, expected)


def test_taps_that_are_no_layers_are_refused_before_the_pass(llama, prompt, monkeypatch):
    backbone = Backbone(llama)
    monkeypatch.setattr(llama, "forward", lambda **_: pytest.fail("computed"))
    for run in (backbone.forward, backbone.states):
        with pytest.raises(ConfigError, match="0 to 1, got"):
            run(prompt(3), taps=(2,))
        with pytest.raises(ConfigError, match="rise"):
            run(prompt(3), taps=(1, 0))


def test_a_model_whose_layers_cannot_be_found_is_refused_when_taps_are_asked_and_only_then(llama, prompt):
    backbone, ids = Backbone(llama), prompt(3)
    expected = backbone.forward(ids).h
    llama.config.num_hidden_layers = 7
    assert torch.equal(backbone.forward(ids).h, expected)
    with pytest.raises(UnsupportedError, match="num_hidden_layers = 7"):
        backbone.forward(ids, taps=(0,))


def test_gradients_run_back_through_states_where_they_are_asked_for(llama, prompt):
    backbone, ids = Backbone(llama), prompt(7)
    plain = backbone.states(ids, taps=(1,))
    assert not plain.h.requires_grad and not plain.layers.requires_grad
    states = backbone.states(ids, taps=(1,), gradient=True)
    assert torch.equal(states.h, plain.h) and torch.equal(states.layers, plain.layers)
    weights = llama.model.layers[0].mlp.down_proj.weight, llama.model.layers[1].mlp.down_proj.weight
    whole = llama(ids, output_hidden_states=True)
    for ours, theirs in ((states.h, whole.hidden_states[-1]), (states.layers[..., 0, :], whole.hidden_states[1])):
        got, expected = (
            torch.autograd.grad(tensor.square().sum(), weights, allow_unused=True, retain_graph=True)
            for tensor in (ours, theirs)
        )
        for mine, other in zip(got, expected, strict=True):
            assert (mine is None) == (other is None)
            if mine is not None:
                torch.testing.assert_close(mine, other)
