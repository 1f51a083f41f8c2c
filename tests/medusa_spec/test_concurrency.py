"""Several threads decode with one model at once, and each text is the one that it is alone."""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from medusa_spec import MedusaModel, NgramDrafter
from medusa_spec.drafters import SuffixDrafter
from medusa_spec.heads import HeadsConfig, MedusaHeads
from medusa_spec.pass_times import SIZES, PassTimes
from medusa_spec.tree import chain_template

NEW = 40
ROUNDS = 3


@pytest.fixture(autouse=True)
def in_turn_often() -> Iterator[None]:
    """Threads give way to each other a hundred times as often as usual, so that what they share is seen."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(usual / 100)
    yield
    sys.setswitchinterval(usual)


def at_once(works: list[Callable[[], Any]]) -> list[Any]:
    """Results of all, each from a thread of its own that begins when all are there."""
    ready, results, errors = threading.Barrier(len(works)), [None] * len(works), []

    def run(place: int) -> None:
        try:
            ready.wait()
            results[place] = [works[place]() for _ in range(ROUNDS)]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def check(works: list[Callable[[], torch.Tensor]], expected: list[torch.Tensor]) -> None:
    for results, answer in zip(at_once(works), expected, strict=True):
        assert all(torch.equal(result, answer) for result in results)


SETTINGS: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_prompts_trees_and_drafters_of_several_threads_do_not_mix(make_model, scripted, prompt, name):
    target = make_model(name)
    prompts = [prompt(length, seed) for seed, length in enumerate((5, 17, 9, 30))]
    expected = [target.generate(ids, **SETTINGS) for ids in prompts]
    model = MedusaModel(target, probe=False)
    drafters = [
        NgramDrafter(min_ngram=1),
        scripted(expected[1][0].tolist(), right=0.9, nodes=14),
        SuffixDrafter(),
    ]
    works: list[Callable[[], torch.Tensor]] = [
        lambda place=place: model.generate(prompts[place], **SETTINGS, drafter=drafters[place]) for place in range(3)
    ]
    works.append(lambda: target.generate(prompts[3], **SETTINGS))  # a plain call of the same model
    check(works, expected)


def test_two_threads_share_heads_and_one_drafter(llama, prompt):
    config = HeadsConfig(hidden_size=32, vocab_size=128, num_heads=3)
    prompts = [prompt(5, 1), prompt(17, 2)]
    expected = [llama.generate(ids, **SETTINGS) for ids in prompts]
    model = MedusaModel(llama, probe=False)
    heads = MedusaHeads(config, model.backbone.projection()).double()
    model.detach()
    model = MedusaModel(llama, heads, drafter="hybrid", tree=chain_template(3), probe=False)
    check([lambda ids=ids: model.generate(ids, **SETTINGS) for ids in prompts], expected)


def test_what_is_learnt_about_drafting_is_shared_and_texts_are_the_same(llama, scripted, prompt, monkeypatch):
    times = {n: 1.0 + 0.05 * n for n in SIZES}
    monkeypatch.setattr("medusa_spec.speculation.pass_times", lambda *_: PassTimes({256: times}))
    prompts = [prompt(5, 1), prompt(17, 2)]
    expected = [llama.generate(ids, **SETTINGS) for ids in prompts]
    model = MedusaModel(llama, drafter=SuffixDrafter(), speculation="auto", probe=False)
    check([lambda ids=ids: model.generate(ids, **SETTINGS) for ids in prompts], expected)


def test_hidden_states_asked_for_in_one_thread_are_not_another_s(llama, scripted, prompt):
    prompts = [prompt(5, 1), prompt(17, 2)]
    more = {"return_dict_in_generate": True, "output_hidden_states": True}
    plain = [llama.generate(ids, **SETTINGS, **more) for ids in prompts]
    model = MedusaModel(llama, drafter=NgramDrafter(min_ngram=1), probe=False)
    works = [lambda ids=ids: model.generate(ids, **SETTINGS, **more) for ids in prompts]
    works.append(lambda: model.generate(prompts[0], **SETTINGS))
    *outs, bare = at_once(works)
    assert all(torch.equal(ids, plain[0].sequences) for ids in bare)
    for results, other in zip(outs, plain, strict=True):
        for out in results:
            assert torch.equal(out.sequences, other.sequences)
            assert len(out.hidden_states) == NEW == out.stats.new_tokens
            torch.testing.assert_close(out.hidden_states, other.hidden_states)


def test_conversations_of_several_threads_have_caches_of_their_own(llama, prompt):
    model = MedusaModel(llama, drafter=NgramDrafter(min_ngram=1), probe=False)

    def talk(generate: Any, seed: int) -> torch.Tensor:
        cache, text = DynamicCache(config=llama.config), prompt(7, seed)
        for turn in range(3):
            mask = torch.ones_like(text)
            text = generate(text, attention_mask=mask, do_sample=False, max_new_tokens=10, cache=cache)
            text = torch.cat([text, prompt(4, seed + turn)], dim=1)
        return text

    expected = [talk(llama.generate, seed) for seed in range(3)]
    check([lambda seed=seed: talk(model.generate, seed) for seed in range(3)], expected)


def test_an_error_in_one_thread_leaves_the_others_alone(llama, scripted, prompt):
    ids = prompt(9)
    answer = llama.generate(ids, **SETTINGS)
    model = MedusaModel(llama, drafter=NgramDrafter(min_ngram=1), probe=False)

    def fails() -> str:
        with pytest.raises(ZeroDivisionError):
            model.generate(ids, **SETTINGS, prefix_allowed_tokens_fn=lambda row, seen: [int(1 / (len(seen) < 20))])
        return "failed"

    texts, failures = at_once([lambda: model.generate(ids, **SETTINGS), fails])
    assert failures == ["failed"] * ROUNDS
    assert all(torch.equal(text, answer) for text in texts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_threads_in_one_prepared_decoder_have_the_bits_that_they_have_alone(make_wide, prompt, monkeypatch, dtype):
    monkeypatch.setattr("medusa_spec.prepare.WORTH_IT", 0.0)
    target = make_wide("llama", dtype=dtype)
    model = MedusaModel(target, drafter=NgramDrafter(min_ngram=1), probe=False)
    prompts = [prompt(5, 1), prompt(60, 2), prompt(17, 3)]
    expected = [model.generate(ids, **SETTINGS) for ids in prompts]
    check([lambda ids=ids: model.generate(ids, **SETTINGS) for ids in prompts], expected)
    model.detach()
