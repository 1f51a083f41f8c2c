"""What anybody may expect of generate() in greedy decoding and sampling, expected of a wrapped model."""

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList, pipeline, set_seed
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.logits_process import TemperatureLogitsWarper
from transformers.generation.stopping_criteria import MaxLengthCriteria

from medusa_spec import MedusaModel
from medusa_spec.errors import UnsupportedError
from medusa_spec.testing import tiny_model, tiny_tokenizer

NEW = 12
NAMES = ["llama", "gemma3"]


@pytest.fixture(params=NAMES)
def target(request, make_model):
    return make_model(request.param)


@pytest.fixture
def ids(prompt):
    return prompt(10)


@pytest.fixture
def model(target, scripted, ids):
    answer = target.generate(ids, do_sample=False, max_new_tokens=40)
    return MedusaModel(target, drafter=scripted(answer[0].tolist(), right=0.9, lone=0.0), probe=False)


def same(model: MedusaModel, *args: Any, **kwargs: Any) -> Any:
    """The drafted output; it equals the plain one."""
    arguments = {"max_new_tokens": NEW, "do_sample": False, **kwargs}
    set_seed(4)
    plain = model.target.generate(*args, **arguments)
    set_seed(4)
    drafted = model.generate(*args, **arguments)
    ours, theirs = (getattr(out, "sequences", out) for out in (drafted, plain))
    assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype and ours.device == theirs.device
    return drafted


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_a_tensor_of_prompt_and_answer_comes_back(model, ids, sampled):
    out = same(model, ids, do_sample=sampled)
    assert type(out) is torch.Tensor and out.shape == (1, 10 + NEW) and out.dtype == torch.long
    assert torch.equal(out[:, :10], ids)
    assert not out.requires_grad


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_a_dict_comes_back_when_asked_for(model, ids, sampled):
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    out = same(model, ids, do_sample=sampled, **asked)
    assert isinstance(out, GenerateDecoderOnlyOutput)
    vocab = model.config.get_text_config().vocab_size
    for tensors in (out.scores, out.logits):
        assert [tensor.shape for tensor in tensors] == [(1, vocab)] * NEW
        assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert out.attentions is None and out.hidden_states is None
    assert set(out.keys()) == {"sequences", "scores", "logits", "cache", "stats"}
    assert torch.equal(out["sequences"], out[0])


def test_what_is_not_asked_for_is_none(model, ids):
    out = same(model, ids, return_dict_in_generate=True)
    assert (out.scores, out.logits, out.hidden_states, out.attentions) == (None, None, None, None)


def test_the_config_can_ask_for_it_all(model, ids):
    config = GenerationConfig(
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        output_hidden_states=True,
        pad_token_id=0,
    )
    out = model.generate(ids, generation_config=config)
    plain = model.target.generate(ids, generation_config=config)
    assert torch.equal(out.sequences, plain.sequences)
    assert len(out.scores) == len(out.hidden_states) == NEW
    torch.testing.assert_close(out.hidden_states, plain.hidden_states)


def test_the_cache_that_comes_back_holds_all_but_the_last_token(model, ids):
    cache = same(model, ids, return_dict_in_generate=True).cache
    plain = model.target.generate(ids, do_sample=False, max_new_tokens=NEW, return_dict_in_generate=True).cache
    assert type(cache) is DynamicCache and cache.get_seq_length() == 10 + NEW - 1
    assert [type(layer) for layer in cache.layers] == [type(layer) for layer in plain.layers]
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        assert ours.keys.shape == theirs.keys.shape and ours.values.shape == theirs.values.shape
        assert ours.keys.dtype == theirs.keys.dtype


def test_an_answer_in_two_parts_is_the_answer(model, ids):
    asked = {"do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    whole = model.generate(ids, max_new_tokens=9, **asked)
    first = model.generate(ids, max_new_tokens=5, **asked)
    mask = torch.ones_like(first.sequences)
    second = model.generate(first.sequences, attention_mask=mask, max_new_tokens=4, cache=first.cache, **asked)
    assert torch.equal(second.sequences, whole.sequences)
    torch.testing.assert_close(first.scores + second.scores, whole.scores, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(second.cache.layers, whole.cache.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)


def test_with_and_without_a_cache_the_answer_is_the_same(model, ids):
    assert torch.equal(same(model, ids, use_cache=False), same(model, ids, use_cache=True))


def test_padding_on_the_left_changes_no_new_token(model, ids):
    alone = same(model, ids)
    for padding in (1, 7):
        padded = torch.cat([torch.zeros(1, padding, dtype=torch.long), ids], dim=1)
        mask = (torch.arange(10 + padding) >= padding)[None]
        for kind in (torch.long, torch.bool, torch.float32):
            out = model.generate(padded, attention_mask=mask.to(kind), do_sample=False, max_new_tokens=NEW)
            assert torch.equal(out[:, padding:], alone) and torch.equal(out[:, :padding], padded[:, :padding])


def test_padding_is_inferred_from_the_pad_token_as_in_plain_decoding(make_model, scripted, prompt):
    target, ids = make_model("llama"), prompt(9)
    ids[:, :3] = 0
    model = MedusaModel(target, drafter=scripted([], right=0.0), probe=False)
    same(model, ids)


def test_a_mask_of_ones_is_no_mask(model, ids):
    assert torch.equal(same(model, ids, attention_mask=torch.ones_like(ids)), same(model, ids))


def test_prompts_come_under_each_of_their_names(model, ids):
    expected = same(model, ids)
    assert torch.equal(same(model, input_ids=ids), expected)
    assert torch.equal(same(model, inputs=ids), expected)
    assert torch.equal(same(model, ids.int()), expected)


def test_what_a_tokenizer_gives_is_taken(scripted):
    target, tokenizer = tiny_model(), tiny_tokenizer()
    model = MedusaModel(target, drafter=scripted([], right=0.0), probe=False)
    out = same(model, **tokenizer("Hello", return_tensors="pt"))
    assert tokenizer.decode(out[0]).startswith("Hello")


def test_without_a_prompt_a_text_begins_with_its_first_token(model):
    out = same(model)
    assert out.shape == (1, 1 + NEW) and int(out[0, 0]) == model.generation_config.bos_token_id


def test_a_seed_fixes_a_sample_and_another_one_another(model, ids):
    texts = []
    for seed in (1, 1, 2):
        set_seed(seed)
        texts.append(model.generate(ids, do_sample=True, max_new_tokens=NEW)[0].tolist())
    assert texts[0] == texts[1] != texts[2]


def test_greedy_decoding_draws_nothing(model, ids):
    state = torch.get_rng_state()
    model.generate(ids, do_sample=False, max_new_tokens=NEW)
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_that_is_given_is_changed(model, ids):
    mask, config = torch.ones_like(ids), GenerationConfig(max_new_tokens=NEW, do_sample=True, top_k=5, pad_token_id=0)
    processors, criteria = LogitsProcessorList([TemperatureLogitsWarper(0.7)]), StoppingCriteriaList()
    criteria.append(MaxLengthCriteria(max_length=18))
    given = (ids.clone(), mask.clone(), config.to_dict(), list(processors), list(criteria))
    own = copy.deepcopy(model.generation_config.to_dict())
    parts = {"generation_config": config, "logits_processor": processors, "stopping_criteria": criteria}
    model.generate(ids, attention_mask=mask, **parts)
    assert torch.equal(ids, given[0]) and torch.equal(mask, given[1])
    assert config.to_dict() == given[2] and model.generation_config.to_dict() == own
    assert list(processors) == given[3] and list(criteria) == given[4]


def test_transition_scores_come_from_the_scores(model, ids):
    asked = {"return_dict_in_generate": True, "output_scores": True, "do_sample": False, "max_new_tokens": NEW}
    ours, theirs = model.generate(ids, **asked), model.target.generate(ids, **asked)
    scores = [
        model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True) for out in (ours, theirs)
    ]
    assert scores[0].shape == (1, NEW)
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradients_are_neither_needed_nor_made(model, ids, mode):
    with mode():
        out = model.generate(ids, do_sample=False, max_new_tokens=NEW, return_dict_in_generate=True, output_scores=True)
    assert not any(score.requires_grad for score in out.scores)
    assert torch.equal(out.sequences, model.target.generate(ids, do_sample=False, max_new_tokens=NEW))


def test_heads_in_training_change_no_answer(make_model, ids):
    target = make_model("gpt2", resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)
    answer = target.generate(ids, do_sample=False, max_new_tokens=NEW)
    model = MedusaModel(target, probe=False).train()
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW), answer)


def test_it_can_generate(model):
    assert model.can_generate() and model.device == model.target.device and model.dtype == model.target.dtype


def test_embeddings_and_positions_are_refused_beside_ids_too(model, ids):
    embeddings = model.get_input_embeddings()(ids)
    with pytest.raises(UnsupportedError, match="inputs_embeds"):
        model.generate(ids, inputs_embeds=embeddings, max_new_tokens=NEW)
    with pytest.raises(UnsupportedError, match="position_ids"):
        model.generate(ids, position_ids=torch.arange(10)[None], max_new_tokens=NEW)


def test_a_mask_of_another_shape_is_hugging_face_s_error(model, ids):
    for generate in (model.generate, model.target.generate):
        with pytest.raises(ValueError, match="must be 2D"):
            generate(ids, attention_mask=torch.ones(1, 1, 10, 10), max_new_tokens=NEW)


def test_two_calls_one_after_the_other_do_not_know_of_each_other(model, ids, prompt):
    expected = same(model, ids)
    same(model, prompt(4, 7), do_sample=True, top_k=3)
    assert torch.equal(same(model, ids), expected)


def test_a_pipeline_decodes_with_it(scripted):
    target, tokenizer = tiny_model(), tiny_tokenizer()
    settings = {"do_sample": False, "max_new_tokens": NEW}
    expected = pipeline("text-generation", model=target, tokenizer=tokenizer)("Hello", **settings)
    model = MedusaModel(target, drafter=scripted([], right=0.0), probe=False)
    assert pipeline("text-generation", model=model, tokenizer=tokenizer)("Hello", **settings) == expected
    assert model.last_stats.new_tokens == NEW
