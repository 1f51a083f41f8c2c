"""generate() returns hidden states, attention weights, scores and logits as Hugging Face does, in the same shapes."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from medusa_spec import MedusaModel, NgramDrafter
from medusa_spec.backbone import Backbone
from medusa_spec.errors import UnsupportedError
from medusa_spec.heads import HeadsConfig, fitted_options, make_heads
from medusa_spec.native.build import library
from medusa_spec.prepared.packed_linear import available

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
            if one is two is None:
                continue
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


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("chunk", [4, 5, 30])
@pytest.mark.parametrize("asked", [STATES, WEIGHTS, {**STATES, **WEIGHTS}], ids=["states", "weights", "both"])
def test_a_prompt_read_in_pieces_gives_the_last_piece_as_in_plain_decoding(
    make_model, scripted, prompt, asked, chunk, padding
):
    target, ids = make_model("gemma3", attn_implementation="eager", dtype=torch.float32), prompt(14)
    ids[:, :padding] = 0
    settings = {**asked, "prefill_chunk_size": chunk, "attention_mask": (torch.arange(14) >= padding).long()[None]}
    drafted, plain = both(target, scripted, ids, **settings)
    left = 0 if chunk < 14 else padding  # of the padding in the last piece
    if "output_hidden_states" in asked:
        check(drafted.hidden_states, plain.hidden_states, padding=left)
    if "output_attentions" in asked:
        check(drafted.attentions, plain.attentions, padding=left)


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


@pytest.mark.parametrize("asked", [STATES, WEIGHTS], ids=["output_hidden_states", "output_attentions"])
def test_of_several_rows_they_are_the_targets_own_and_it_is_said(make_model, scripted, prompt, asked):
    target = make_model("llama", attn_implementation="eager")
    ids = torch.cat([prompt(5, seed=1), prompt(5, seed=2)])
    plain = target.generate(ids, **asked)
    model = MedusaModel(target, drafter=scripted([], right=0.0), probe=False)
    found = model.generate(ids, **asked)
    name = "hidden_states" if asked is STATES else "attentions"
    check(found[name], plain[name])
    assert "own loop" in model.last_stats.rule and "of it were asked for" in model.last_stats.rule


def test_whole_texts_without_a_cache_are_refused(llama, scripted, prompt):
    model = MedusaModel(llama, drafter=scripted([], right=0.0), probe=False)
    with pytest.raises(UnsupportedError, match="use_cache=False"):
        model.generate(prompt(5), **STATES, use_cache=False)


@pytest.mark.parametrize("chunk", [None, 5])
def test_heads_that_read_layers_of_the_target_are_shown_them_beside(llama, prompt, chunk):
    ids, settings = prompt(12), {**STATES, "prefill_chunk_size": chunk}
    plain = llama.generate(ids, **settings)
    backbone = Backbone(llama)
    options = fitted_options("eagle3", {"taps": "0,1"}, backbone.config)
    config = HeadsConfig(hidden_size=32, vocab_size=128, kind="eagle3", num_heads=3, options=options)
    heads = make_heads(config, backbone.projection(), None, backbone.embedding()).double()
    backbone.detach()
    model = MedusaModel(llama, heads, probe=False)
    drafted = model.generate(ids, **settings)
    assert torch.equal(drafted.sequences, plain.sequences)
    assert model.last_stats.drafted_passes > 0
    check(drafted.hidden_states, plain.hidden_states)


@pytest.mark.parametrize("pieces", [{}, {"prefill_chunk_size": 5}], ids=["at once", "in pieces"])
def test_a_text_that_is_read_anew_gives_all_of_it_as_in_plain_decoding(make_model, scripted, prompt, pieces):
    edge = {"original_max_position_embeddings": 16}
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0, **edge, **factors}
    more = {"rope_parameters": rope, "max_position_embeddings": 96, "attn_implementation": "eager", **edge}
    drafted, plain = both(make_model("phi3", **more), scripted, prompt(9), **{**STATES, **WEIGHTS, **pieces})
    assert sum(states[0].shape[1] > 1 for states in plain.hidden_states) == 2
    check(drafted.hidden_states, plain.hidden_states)
    check(drafted.attentions, plain.attentions)


def test_steps_of_fixed_shape_are_not_taken_for_them(llama, scripted, prompt):
    model = MedusaModel(llama, probe=False)
    model.steps.mode = "eager"
    model.generate(prompt(5), do_sample=False, max_new_tokens=4)
    assert model.graph_reason == "eager steps were asked for"
    out = model.generate(prompt(5), **STATES)
    assert "token by token" in model.graph_reason
    check(out.hidden_states, llama.generate(prompt(5), **STATES).hidden_states)


@pytest.mark.skipif(not available(), reason=f"no kernel on this machine: {library().reason}")
@pytest.mark.parametrize("chunk", [None, 20, 70])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_of_a_prepared_target_they_have_the_bits_of_its_plain_decoding(make_wide, prompt, monkeypatch, name, chunk):
    """A prompt is read there in pieces that nobody asked for."""
    monkeypatch.setattr("medusa_spec.prepare.WORTH_IT", 0.0)
    target, ids = make_wide(name, dtype=torch.bfloat16), prompt(130)
    plain = target.generate(ids, **STATES, prefill_chunk_size=chunk)
    model = MedusaModel(target, drafter=NgramDrafter(min_ngram=1), probe=False)
    assert model.backbone.reads_chains
    drafted = model.generate(ids, **STATES, prefill_chunk_size=chunk)
    own = model.generate(ids, **STATES, prefill_chunk_size=chunk, draft_nodes=0)
    assert torch.equal(drafted.sequences, own.sequences)
    for states, others, theirs in zip(drafted.hidden_states, own.hidden_states, plain.hidden_states, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(states, others, strict=True))
        assert [layer.shape for layer in states] == [layer.shape for layer in theirs]
    for one, two in zip(drafted.hidden_states[0], plain.hidden_states[0], strict=True):
        torch.testing.assert_close(one, two, rtol=0.1, atol=0.1)
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW), drafted.sequences)


@pytest.mark.parametrize("layers", [2, -2, [0, -1], [1], True], ids=str)
def test_layers_are_selected_by_their_numbers(llama, scripted, prompt, layers):
    drafted, plain = both(llama, scripted, prompt(8), **{**STATES, "output_hidden_states": layers})
    assert [layer is None for layer in drafted.hidden_states[0]] == [layer is None for layer in plain.hidden_states[0]]
    check(drafted.hidden_states, plain.hidden_states)
