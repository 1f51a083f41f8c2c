"""A prompt is read the same however it is cut, and whatever was in the cache before."""

import pytest
import torch

from medusa_spec.attention import TreePass
from medusa_spec.backbone import Backbone
from medusa_spec.cache import SlabCache
from medusa_spec.native.build import library
from medusa_spec.prefill import CHAIN, prefill
from medusa_spec.prepare import prepare
from medusa_spec.prepared.packed_linear import available
from medusa_spec.tree import chain

needs_kernels = pytest.mark.skipif(not available(), reason=f"no kernel on this machine: {library().reason}")


@pytest.fixture(params=["llama", "qwen3", "mistral-window"])
def fast(request, make_model, monkeypatch):
    monkeypatch.setattr("medusa_spec.prepare.WORTH_IT", 0.0)
    model = make_model(request.param, dtype=torch.bfloat16, head_dim=16, intermediate_size=64).requires_grad_(False)
    prepare(model, model.get_output_embeddings())
    return Backbone(model)


@torch.inference_mode()
def test_plain_reading_gives_the_logits_of_one_forward(any_model, prompt):
    backbone, ids = Backbone(any_model), prompt(19)
    assert not backbone.reads_chains
    expected = backbone.forward(ids).logits[:, -1:]
    for chunk in (None, 1, 7, 19, 50):
        cache = SlabCache(backbone.config)
        out = prefill(backbone, cache, ids, reserve=4, chunk=chunk)
        torch.testing.assert_close(out.logits, expected, rtol=1e-6, atol=1e-6)
        assert cache.lengths == [19]


@needs_kernels
@torch.inference_mode()
@pytest.mark.parametrize("length", [1, 2, CHAIN, CHAIN + 1, CHAIN + 2, 3 * CHAIN])
def test_chains_give_the_same_bits_however_they_are_cut(fast, prompt, length):
    assert fast.reads_chains
    ids, results = prompt(length), []
    for chunk in (None, 1, 7, 1000):
        cache = SlabCache(fast.config)
        results.append(prefill(fast, cache, ids, reserve=4, chunk=chunk).logits)
        assert cache.lengths == [length]
    assert all(torch.equal(result, results[0]) for result in results)


@needs_kernels
@torch.inference_mode()
def test_chains_agree_with_plain_reading_up_to_rounding(fast, prompt):
    ids = prompt(100)
    by_chains = prefill(fast, SlabCache(fast.config), ids, reserve=4).logits.float()
    plain = fast.forward(ids).logits[:, -1:].float()
    assert (by_chains - plain).norm() < 0.05 * plain.norm()


@needs_kernels
@torch.inference_mode()
def test_decoding_goes_on_as_if_the_text_had_been_the_prompt(fast, prompt):
    ids = prompt(90)
    whole = prefill(fast, SlabCache(fast.config), ids, reserve=4).logits[0, -1]
    cache = SlabCache(fast.config)
    prefill(fast, cache, ids[:, :60], reserve=40)
    for place in range(60, 90):
        cache.make_room(1)
        tree_pass = TreePass(shape=chain(0), cache=cache, device=fast.device)
        logits = fast.verify(ids[:, place : place + 1], tree_pass).logits[0, -1]
        cache.keep(0, (0,))
    assert torch.equal(logits, whole)


@needs_kernels
@torch.inference_mode()
def test_a_loaded_cache_is_read_on(fast, prompt):
    ids, first = prompt(80), SlabCache(fast.config)
    prefill(fast, first, ids[:, :50], reserve=4)
    loaded = SlabCache(fast.config)
    loaded.load(first.export(fast.config))
    again = prefill(fast, loaded, ids[:, 50:], reserve=4).logits
    assert torch.equal(again, prefill(fast, SlabCache(fast.config), ids, reserve=4).logits)


@torch.inference_mode()
@pytest.mark.parametrize("reads", [(), (0,), (0, 1)], ids=str)
def test_states_of_all_that_was_read_are_those_of_one_forward(any_model, prompt, reads):
    backbone, ids = Backbone(any_model), prompt(19)
    expected = backbone.states(ids, taps=reads)
    logits = backbone.forward(ids).logits[:, -1:]
    for known in (0, 5):
        for chunk in (None, 1, 7, 50):
            cache = SlabCache(backbone.config)
            if known:
                positions = torch.arange(known)[None]
                backbone.forward(ids[:, :known], position_ids=positions, cache=cache, last_only=True)
            out = prefill(backbone, cache, ids[:, known:], reserve=4, chunk=chunk, reads=reads)
            torch.testing.assert_close(out.h, expected.h[:, known:], rtol=1e-6, atol=1e-6)
            if reads:
                torch.testing.assert_close(out.layers, expected.layers[:, known:], rtol=1e-6, atol=1e-6)
            else:
                assert out.layers is None
            torch.testing.assert_close(out.logits, logits, rtol=1e-6, atol=1e-6)
            last = out.last()
            assert torch.equal(last.h, out.h[:, -1:]) and last.logits.shape[1] == 1 and cache.lengths == [19]


@torch.inference_mode()
def test_without_readers_h_is_of_the_last_position_alone(any_model, prompt):
    backbone, ids = Backbone(any_model), prompt(19)
    for chunk in (None, 7):
        out = prefill(backbone, SlabCache(backbone.config), ids, reserve=4, chunk=chunk)
        assert out.h.shape[:2] == (1, 1) and out.layers is None


@needs_kernels
@torch.inference_mode()
@pytest.mark.parametrize("length", [1, 2, CHAIN + 2])
def test_chains_give_the_same_states_however_they_are_cut(fast, prompt, length):
    ids, results = prompt(length), []
    for chunk in (None, 1, 7):
        results.append(prefill(fast, SlabCache(fast.config), ids, reserve=4, chunk=chunk, reads=(0, 1)))
        assert results[-1].h.shape[:2] == (1, length) and results[-1].layers.shape[:3] == (1, length, 2)
    for out in results[1:]:
        assert torch.equal(out.h, results[0].h) and torch.equal(out.layers, results[0].layers)
        assert torch.equal(out.logits, results[0].logits)
    alone = prefill(fast, SlabCache(fast.config), ids, reserve=4)
    assert torch.equal(alone.logits, results[0].logits) and torch.equal(alone.h, results[0].h[:, -1:])
