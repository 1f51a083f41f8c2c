"""A wrapped model says what `generate` says on every route, with whatever generate() is asked for."""

import pytest
import torch
from transformers import DynamicCache

from medusa_spec import MedusaModel
from medusa_spec.batch import Text, decode_batch
from medusa_spec.pass_times import PassTimes, measure

ROUTES = {
    "falcon": "4-D mask",
    "bloom": "paths as batch rows",
    "mamba": "levels as batch rows",
}
PROMPT = torch.arange(20, 33)[None]


@pytest.fixture(params=ROUTES)
def wrapped(request, make_other) -> MedusaModel:
    """A model on each route in turn, with look-up drafts."""
    model = MedusaModel(make_other(request.param), drafter="ngram")
    assert model.route == ROUTES[request.param]
    return model


@pytest.mark.parametrize(
    "arguments",
    [
        {"do_sample": False, "repetition_penalty": 1.3},
        {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
        {"do_sample": False, "prefill_chunk_size": 5},
        {"do_sample": False, "eos_token_id": list(range(60, 90))},
    ],
    ids=["processors", "sampling", "chunks", "eos"],
)
def test_what_generate_is_asked_for_is_done(wrapped, arguments) -> None:
    answers = []
    for model in (wrapped.target, wrapped):
        torch.manual_seed(3)
        plain = (
            {k: v for k, v in arguments.items() if k != "prefill_chunk_size"} if model is wrapped.target else arguments
        )
        answers.append(model.generate(PROMPT, max_new_tokens=20, **plain))
    assert torch.equal(*answers)


def test_logits_and_the_models_own_cache_are_returned(wrapped) -> None:
    asked = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 9}
    ours, theirs = wrapped.generate(PROMPT, **asked), wrapped.target.generate(PROMPT, **asked)
    for one, other in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert isinstance(ours.cache, DynamicCache)


def test_texts_side_by_side_are_those_of_one_by_one(wrapped) -> None:
    texts = [Text(key=key, prompt=[5 + key, 6, 7], new_tokens=6) for key in range(3)]
    for text in decode_batch(wrapped.backbone, texts, batch=2, eos_ids=frozenset()):
        alone = wrapped.target.generate(torch.tensor([text.prompt]), max_new_tokens=6, do_sample=False)
        assert text.tokens == alone[0, 3:].tolist()


def test_rows_of_a_batch_are_those_of_one_by_one(wrapped) -> None:
    prompts = torch.stack([PROMPT[0], PROMPT[0].flip(0), PROMPT[0] + 40])
    for arguments in ({"do_sample": False}, {"do_sample": False, "eos_token_id": list(range(60, 75))}):
        answers = wrapped.generate(prompts, max_new_tokens=12, **arguments)
        for prompt, answer in zip(prompts, answers, strict=True):
            alone = wrapped.target.generate(prompt[None], max_new_tokens=12, **arguments)[0]
            assert torch.equal(answer[: len(alone)], alone) and not answer[len(alone) :].any()


def test_hidden_states_are_left_to_the_models_own_loop(wrapped) -> None:
    asked = {"do_sample": False, "return_dict_in_generate": True, "output_hidden_states": True, "max_new_tokens": 5}
    ours, theirs = wrapped.generate(PROMPT, **asked), wrapped.target.generate(PROMPT, **asked)
    assert torch.equal(ours.sequences, theirs.sequences) and torch.equal(
        ours.hidden_states[2][1], theirs.hidden_states[2][1]
    )
    assert wrapped.route in wrapped.last_stats.rule


def test_passes_can_be_timed(wrapped) -> None:
    times = measure(wrapped.backbone, sizes=(1, 4), prefixes=(8,))
    assert isinstance(times, PassTimes) and times.seconds(4, 8) > 0


def test_steps_of_fixed_shape_say_that_they_do_not_serve(wrapped) -> None:
    wrapped.steps.mode = "eager"
    answer = wrapped.generate(PROMPT, max_new_tokens=6, do_sample=False, draft_nodes=0)
    assert torch.equal(answer, wrapped.target.generate(PROMPT, max_new_tokens=6, do_sample=False))
    assert wrapped.graph_reason is not None and wrapped.route in wrapped.graph_reason


@pytest.mark.parametrize("name", ROUTES)
def test_heads_that_read_layers_are_shown_them(make_other, name, monkeypatch) -> None:
    model = MedusaModel(make_other(name), drafter="ngram")
    shown = []
    session = type(model.drafter.begin([]))
    monkeypatch.setattr(type(model.drafter), "reads", (0, 1))
    monkeypatch.setattr(session, "read", lambda self, ids, states: shown.append((list(ids), states)))
    answer = model.generate(PROMPT, max_new_tokens=9, do_sample=False)[0].tolist()
    assert sum((ids for ids, _ in shown), []) == answer[:-1]
    assert all(states.layers.shape == (len(ids), 2, 32) for ids, states in shown)
    full = model.backbone.forward(torch.tensor([answer[:-1]]), taps=(0, 1))
    layers, h = (torch.cat([getattr(states, what) for _, states in shown]) for what in ("layers", "h"))
    torch.testing.assert_close(layers, full.layers[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(h, full.h[0], rtol=0, atol=1e-5)
