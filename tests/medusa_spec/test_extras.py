"""generate() returns hidden states, attention weights, scores and logits as Hugging Face does, in the same shapes."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from medusa_spec import MedusaModel
from medusa_spec.errors import UnsupportedError

NEW = 20
SETTINGS: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True}
STATES = {**SETTINGS, "output_hidden_states": True}
WEIGHTS = {**SETTINGS, "output_attentions": True}

WINDOWED = ["mistral-window", "gemma2", "gemma3", "gpt-oss"]
MODELS = ["llama", *WINDOWED, "gpt2", "phi3", "mixtral"]


def both(target: Any, scripted: Any, ids: torch.Tensor, **settings: Any) -> tuple[Any, Any]:
    """(drafted, plain), the drafts being right mostly."""
    plain = target.generate(ids, **settings)
    answer = plain.sequences[0, ids.shape[1] - real_length(ids, settings) :].tolist()
    model = MedusaModel(target, drafter=scripted(answer, right=0.9, lone=0.0), probe=False)
    try:
        drafted = model.generate(ids, **settings)
    finally:
        model.detach()
    assert torch.equal(drafted.sequences, plain.sequences)
    assert model.last_stats.accepted > 0
    return drafted, plain


def real_length(ids: torch.Tensor, settings: dict[str, Any]) -> int:
    mask = settings.get("attention_mask")
    return ids.shape[1] if mask is None else int(mask.sum())


def check(ours: Any, theirs: Any, *, padding: int = 0) -> None:
    """The same tuples of tuples of the same tensors, but for what stands at padding."""
    assert type(ours) is type(theirs) is tuple and len(ours) == len(theirs)
    for step, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        assert type(own) is type(other) is tuple and len(own) == len(other) > 0
        for one, two in zip(own, other, strict=True):
            assert (one.shape, one.dtype) == (two.shape, two.dtype)
            rows = (slice(None),) * (one.dim() - 2) + (slice(0 if step else padding, None),)
            torch.testing.assert_close(one[rows], two[rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_are_those_of_the_prompt_and_then_of_each_token(make_model, scripted, prompt, name):
    drafted, plain = both(make_model(name), scripted, prompt(13), **STATES)
    check(drafted.hidden_states, plain.hidden_states)
    assert [layer.shape[1] for layer in drafted.hidden_states[0]] == [13] * len(drafted.hidden_states[0])
    assert drafted.attentions is None


@pytest.mark.parametrize("length", [5, 13])
@pytest.mark.parametrize("name", MODELS)
def test_attention_weights_are_those_of_eager_attention(make_model, scripted, prompt, name, length):
    drafted, plain = both(make_model(name, attn_implementation="eager"), scripted, prompt(length), **WEIGHTS)
    check(drafted.attentions, plain.attentions)
    assert drafted.hidden_states is None
    for layer in drafted.attentions[-1]:
        sums = layer.sum(-1)
        assert name == "gpt-oss" or torch.allclose(sums, torch.ones_like(sums), atol=1e-5)  # a sink takes the rest


def test_other_attentions_give_no_weights_as_in_plain_decoding(make_model, scripted, prompt):
    drafted, plain = both(make_model("llama", attn_implementation="sdpa"), scripted, prompt(7), **WEIGHTS)
    assert drafted.attentions == plain.attentions == ((),) * NEW


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3"])
def test_padding_stands_as_zeros(make_model, scripted, prompt, name):
    ids = prompt(11)
    ids[:, :4] = 0
    mask = (torch.arange(11) >= 4).long()[None]
    settings = {**STATES, **WEIGHTS, "attention_mask": mask}
    # In float64 Hugging Face's eager attention gives nan for rows that see nothing.
    target = make_model(name, attn_implementation="eager", dtype=torch.float32)
    drafted, plain = both(target, scripted, ids, **settings)
    check(drafted.hidden_states, plain.hidden_states, padding=4)
    check(drafted.attentions, plain.attentions, padding=4)
    assert all(not layer[:, :4].any() for layer in drafted.hidden_states[0])


@pytest.mark.parametrize("chunk", [4, 6, 30])
def test_a_prompt_read_in_pieces_gives_the_last_piece_as_in_plain_decoding(make_model, scripted, prompt, chunk):
    target = make_model("gemma3", attn_implementation="eager")
    drafted, plain = both(target, scripted, prompt(12), **{**STATES, **WEIGHTS, "prefill_chunk_size": chunk})
    check(drafted.hidden_states, plain.hidden_states)
    check(drafted.attentions, plain.attentions)


def test_sampling_and_processors_change_nothing_about_them(llama, scripted, prompt):
    settings = {**STATES, "do_sample": True, "repetition_penalty": 1.3, "top_k": 9, "output_scores": True}
    settings["output_logits"] = True
    torch.manual_seed(0)
    plain = llama.generate(prompt(9), **settings)
    model = MedusaModel(llama, drafter=scripted(plain.sequences[0].tolist(), right=0.9), probe=False)
    torch.manual_seed(0)
    drafted = model.generate(prompt(9), **settings)
    assert torch.equal(drafted.sequences, plain.sequences)
    check(drafted.hidden_states, plain.hidden_states)
    for name in ("scores", "logits"):
        ours, theirs = getattr(drafted, name), getattr(plain, name)
        assert [(score.shape, score.dtype) for score in ours] == [(score.shape, score.dtype) for score in theirs]
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("new", [1, 2, 3, 7])
def test_there_is_an_entry_for_every_token_wherever_the_text_ends(llama, scripted, prompt, new):
    drafted, plain = both_of(llama, scripted, prompt(6), **{**STATES, "max_new_tokens": new, "output_scores": True})
    assert len(drafted.hidden_states) == len(drafted.scores) == len(plain.hidden_states) == new
    check(drafted.hidden_states, plain.hidden_states)


def both_of(target: Any, scripted: Any, ids: torch.Tensor, **settings: Any) -> tuple[Any, Any]:
    """As `both`, of an answer that is longer than what is asked for."""
    answer = target.generate(ids, do_sample=False, max_new_tokens=NEW)[0].tolist()
    model = MedusaModel(target, drafter=scripted(answer, right=1.0, lone=0.0), probe=False)
    drafted = model.generate(ids, **settings)
    model.detach()
    return drafted, target.generate(ids, **settings)


def test_eos_inside_an_accepted_path_ends_them_too(llama, scripted, prompt):
    ids = prompt(6)
    answer = llama.generate(ids, do_sample=False, max_new_tokens=NEW)
    for place in (7, 9, 12):
        drafted, plain = both_of(llama, scripted, ids, **STATES, eos_token_id=int(answer[0, place]))
        check(drafted.hidden_states, plain.hidden_states)


def test_of_a_text_in_a_cache_they_begin_with_what_is_new(make_model, scripted, prompt):
    target = make_model("gemma3", attn_implementation="eager")
    first, second = prompt(14, 1), prompt(3, 2)

    def talk(generate: Any) -> Any:
        cache = DynamicCache(config=target.config)
        one = generate(first, do_sample=False, max_new_tokens=5, cache=cache)
        return generate(torch.cat([one, second], dim=1), **{**STATES, **WEIGHTS, "cache": cache})

    plain = talk(target.generate)
    model = MedusaModel(target, drafter=scripted(plain.sequences[0].tolist(), right=0.9), probe=False)
    drafted = talk(model.generate)
    assert torch.equal(drafted.sequences, plain.sequences)
    check(drafted.hidden_states, plain.hidden_states)
    check(drafted.attentions, plain.attentions)


def test_without_a_dict_nothing_is_collected(llama, scripted, prompt):
    model = MedusaModel(llama, drafter=scripted([], right=0.0), probe=False)
    out = model.generate(prompt(5), do_sample=False, max_new_tokens=4, output_hidden_states=True)
    assert isinstance(out, torch.Tensor) and out.shape == (1, 9)


def test_whole_texts_without_a_cache_are_refused(llama, scripted, prompt):
    model = MedusaModel(llama, drafter=scripted([], right=0.0), probe=False)
    with pytest.raises(UnsupportedError, match="use_cache=False"):
        model.generate(prompt(5), **STATES, use_cache=False)
