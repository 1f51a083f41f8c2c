"""A decoder in one call is the decoder, and is left alone where it is anything else."""

import threading

import pytest
import torch
from torch import nn

from medusa_spec.attention import TreePass
from medusa_spec.backbone import Backbone
from medusa_spec.cache import SlabCache
from medusa_spec.native.build import library
from medusa_spec.prepare import prepare
from medusa_spec.prepared.decoder import FastDecoder
from medusa_spec.prepared.decoder_layer import run_layers
from medusa_spec.prepared.packed_linear import available
from medusa_spec.tree import chain, shape_of

pytestmark = pytest.mark.skipif(not available(), reason=f"no kernel on this machine: {library().reason}")

SHAPE = shape_of((-1, 0, 1, 0, 3, 2, 3, 0))


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch):
    monkeypatch.setattr("medusa_spec.prepare.WORTH_IT", 0.0)


@pytest.fixture(params=["llama", "qwen3", "mistral-window"])
def name(request):
    return request.param


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def dtype(request):
    return request.param


def prepared_backbone(model):
    model.requires_grad_(False)
    prepare(model, model.get_output_embeddings())
    return Backbone(model)


def prompted(backbone, ids):
    cache = SlabCache(backbone.config)
    backbone.forward(ids, last_only=True, cache=cache)
    cache.seal(32)
    return cache


@torch.inference_mode()
def tree_output(backbone, prompt, tokens, taps=()):
    cache = prompted(backbone, prompt)
    cache.make_room(SHAPE.size)
    out = backbone.verify(tokens, TreePass(shape=SHAPE, cache=cache, device=backbone.device), taps=taps)
    return out, cache


@torch.inference_mode()
def path_output(backbone, prompt, tokens, node, taps=()):
    """By one-token passes over the path to a node."""
    cache = prompted(backbone, prompt)
    for place in SHAPE.path_to(node):
        cache.make_room(1)
        tree_pass = TreePass(shape=chain(0), cache=cache, device=backbone.device)
        out = backbone.verify(tokens[:, place : place + 1], tree_pass, taps=taps)
        cache.keep(0, (0,))
    return out


@pytest.mark.parametrize("length", [1, 5, 23])
def test_every_node_has_the_bits_of_one_token_passes_over_its_path(make_model, prompt, name, dtype, length):
    backbone = prepared_backbone(make_model(name, dtype=dtype, head_dim=16, intermediate_size=64))
    assert isinstance(backbone.model.get_decoder(), FastDecoder)
    ids, tokens = prompt(length), prompt(SHAPE.size)
    out, _ = tree_output(backbone, ids, tokens)
    for node in range(SHAPE.size):
        assert torch.equal(out.logits[0, node], path_output(backbone, ids, tokens, node).logits[0, 0]), node


def test_one_call_gives_what_layer_by_layer_gives(make_model, prompt, name, dtype, monkeypatch):
    backbone = prepared_backbone(make_model(name, dtype=dtype, head_dim=16, intermediate_size=64))
    ids, tokens = prompt(9), prompt(SHAPE.size)
    at_once, cache = tree_output(backbone, ids, tokens)
    monkeypatch.setattr("medusa_spec.prepared.decoder._hidden", lambda *_: None)
    one_by_one, other = tree_output(backbone, ids, tokens)
    monkeypatch.setattr("medusa_spec.prepared.decoder_layer.takes_pass", lambda *_: False)
    part_by_part, third = tree_output(backbone, ids, tokens)
    for again, written in ((one_by_one, other), (part_by_part, third)):
        assert torch.equal(again.logits, at_once.logits)
        assert torch.equal(again.h, at_once.h)
        for layer in range(2):
            for got, expected in zip(written.buffers(layer), cache.buffers(layer), strict=True):
                assert torch.equal(got, expected)


SIZES = {"head_dim": 16, "intermediate_size": 64, "num_hidden_layers": 4}


@pytest.fixture
def deep(make_model, name, dtype):
    """Four layers in one call."""
    backbone = prepared_backbone(make_model(name, dtype=dtype, **SIZES))
    assert isinstance(backbone.model.get_decoder(), FastDecoder)
    return backbone


@pytest.mark.parametrize("taps", [(0,), (3,), (1, 2), (0, 1, 2, 3)])
def test_taps_change_no_bit_and_have_those_of_one_token_passes(deep, prompt, taps):
    ids, tokens = prompt(9), prompt(SHAPE.size)
    plain, _ = tree_output(deep, ids, tokens)
    tapped, _ = tree_output(deep, ids, tokens, taps)
    assert torch.equal(tapped.logits, plain.logits) and torch.equal(tapped.h, plain.h)
    for node in range(SHAPE.size):
        alone = path_output(deep, ids, tokens, node, taps)
        assert torch.equal(tapped.layers[0, node], alone.layers[0, 0]), node


def test_taps_cost_no_other_call(deep, prompt, monkeypatch):
    counts = []

    def count(records, *rest):
        counts.append(len(records))
        return run_layers(records, *rest)

    monkeypatch.setattr("medusa_spec.prepared.decoder.run_layers", count)
    for taps in ((), (0,), (0, 1, 3), (2,)):
        tree_output(deep, prompt(9), prompt(SHAPE.size), taps)
    assert counts == [4] * 4


def test_taps_come_with_the_same_bits_where_layers_run_one_by_one(deep, prompt, monkeypatch):
    ids, tokens, taps = prompt(9), prompt(SHAPE.size), (0, 2, 3)
    at_once, _ = tree_output(deep, ids, tokens, taps)
    handle = deep.model.model.layers[1].register_forward_hook(lambda *_: None)
    hooked, _ = tree_output(deep, ids, tokens, taps)
    handle.remove()
    monkeypatch.setattr("medusa_spec.prepared.decoder._hidden", lambda *_: None)
    one_by_one, _ = tree_output(deep, ids, tokens, taps)
    monkeypatch.setattr("medusa_spec.prepared.decoder_layer.takes_pass", lambda *_: False)
    part_by_part, _ = tree_output(deep, ids, tokens, taps)
    for again in (hooked, one_by_one, part_by_part):
        assert torch.equal(again.layers, at_once.layers)
        assert torch.equal(again.h, at_once.h)
    assert not any(layer._forward_pre_hooks for layer in deep.model.model.layers)


def test_taps_are_those_of_the_plain_target_but_for_rounding(make_model, deep, prompt, name, dtype):
    ids, tokens, taps = prompt(9), prompt(SHAPE.size), (0, 1, 3)
    fast, _ = tree_output(deep, ids, tokens, taps)
    slow, _ = tree_output(Backbone(make_model(name, dtype=dtype, **SIZES)), ids, tokens, taps)
    room = {torch.float32: 1e-3, torch.bfloat16: 0.1}[dtype]
    assert torch.equal(fast.layers[:, :, 0], slow.layers[:, :, 0])  # the embeddings
    torch.testing.assert_close(fast.layers, slow.layers, rtol=room, atol=room * float(slow.layers.abs().mean()))


def test_one_who_taps_plain_passes_changes_no_bit_of_another_s_trees(deep, prompt):
    ids, tokens, taps = prompt(9), prompt(SHAPE.size), (1, 3)
    expected, _ = tree_output(deep, ids, tokens)
    states, stop, seen = deep.states(ids, taps=taps).layers, threading.Event(), []

    def run():
        while not stop.is_set():
            seen.append(deep.states(ids, taps=taps).layers)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        trees = [tree_output(deep, ids, tokens)[0] for _ in range(10)]
    finally:
        stop.set()
        thread.join()
    assert all(tree.layers is None and torch.equal(tree.logits, expected.logits) for tree in trees)
    assert seen and all(torch.equal(layers, states) for layers in seen)


def test_all_states_are_given_beside_the_last_logits(deep, prompt):
    cache = prompted(deep, prompt(9))
    cache.make_room(SHAPE.size)
    tree_pass = TreePass(shape=SHAPE, cache=cache, device=deep.device)
    out = deep.verify(prompt(SHAPE.size), tree_pass, last_only=True, all_states=True, taps=(2,))
    expected, _ = tree_output(deep, prompt(9), prompt(SHAPE.size), (2,))
    assert torch.equal(out.h, expected.h) and torch.equal(out.layers, expected.layers)
    assert torch.equal(out.logits, expected.logits[:, -1:])


def test_threads_change_no_bit(make_model, prompt, name, dtype):
    backbone, threads, results = (
        prepared_backbone(make_model(name, dtype=dtype, head_dim=16, intermediate_size=64)),
        torch.get_num_threads(),
        [],
    )
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(tree_output(backbone, prompt(9), prompt(SHAPE.size))[0].logits)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_who_listens_in_between_hears_everything(make_model, prompt):
    backbone = prepared_backbone(make_model("llama", dtype=torch.float32, head_dim=16, intermediate_size=64))
    ids, tokens = prompt(9), prompt(SHAPE.size)
    expected, _ = tree_output(backbone, ids, tokens)
    for part in ("model.layers.1", "model.layers.0.mlp", "model.layers.1.self_attn.q_proj", "model.layers.0.self_attn"):
        heard: list[tuple[int, ...]] = []
        module = backbone.model.get_submodule(part)
        handle = module.register_forward_hook(lambda module, args, out, heard=heard: heard.append(type(out)))
        out, _ = tree_output(backbone, ids, tokens)
        handle.remove()
        assert len(heard) == 2, part  # prompt and tree
        torch.testing.assert_close(out.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_hidden_states_are_given_when_asked_for(make_model, prompt):
    model = make_model("llama", dtype=torch.float32, head_dim=16, intermediate_size=64)
    backbone = prepared_backbone(model)
    cache = prompted(backbone, prompt(9))
    cache.make_room(SHAPE.size)
    tree_pass = TreePass(shape=SHAPE, cache=cache, device=backbone.device)
    out = model.model(
        input_ids=prompt(SHAPE.size),
        position_ids=tree_pass.positions,
        attention_mask=tree_pass.no_mask,
        cache=cache,
        medusa_tree_pass=tree_pass,
        output_hidden_states=True,
    )
    assert len(out.hidden_states) == 3


def test_a_layer_that_was_exchanged_is_used(make_model, prompt):
    model = make_model("llama", dtype=torch.float32, head_dim=16, intermediate_size=64)
    backbone = prepared_backbone(model)
    ids, tokens = prompt(9), prompt(SHAPE.size)

    class Nothing(nn.Module):
        def forward(self, hidden_states, **kwargs):
            return torch.zeros_like(hidden_states)

    model.model.layers[0].mlp = Nothing()
    out, _ = tree_output(backbone, ids, tokens)
    reference = make_model("llama", dtype=torch.float32, head_dim=16, intermediate_size=64)
    reference.model.layers[0].mlp = Nothing()
    expected, _ = tree_output(Backbone(reference), ids, tokens)
    torch.testing.assert_close(out.logits, expected.logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt2", "gpt-neox", "phi3", "mixtral", "gpt-oss"])
def test_other_decoders_are_left_alone(make_model, name):
    backbone = prepared_backbone(make_model(name, dtype=torch.bfloat16))
    assert not isinstance(backbone.model.get_decoder(), FastDecoder)
    assert not backbone.reads_chains


def test_who_asked_for_hidden_states_once_does_not_slow_the_passes_after(deep, prompt, monkeypatch):
    """Transformers leaves its hooks on the layers then; they do nothing in a pass that is not asked."""
    ids, tokens, counts = prompt(9), prompt(SHAPE.size), []
    expected, _ = tree_output(deep, ids, tokens)
    asked = deep.model(ids, output_hidden_states=True, output_attentions=True)
    assert len(asked.hidden_states) == 5
    assert any(layer._forward_hooks for layer in deep.model.get_decoder().layers)
    monkeypatch.setattr(
        "medusa_spec.prepared.decoder.run_layers",
        lambda records, *a: counts.append(len(records)) or run_layers(records, *a),
    )
    again, _ = tree_output(deep, ids, tokens)
    assert counts == [4]
    assert torch.equal(again.logits, expected.logits)


def test_hidden_states_of_a_tree_change_no_bit_of_it(deep, prompt):
    cache = prompted(deep, prompt(9))
    cache.make_room(SHAPE.size)
    tree_pass = TreePass(shape=SHAPE, cache=cache, device=deep.device)
    with torch.inference_mode():
        out = deep.verify(prompt(SHAPE.size), tree_pass, collect=("hidden_states",))
    plain, _ = tree_output(deep, prompt(9), prompt(SHAPE.size), (0, 1, 2, 3))
    assert torch.equal(out.logits, plain.logits)
    assert torch.equal(torch.stack(out.hidden_states[:4], 2), plain.layers)
    assert torch.equal(out.hidden_states[4], plain.h)
