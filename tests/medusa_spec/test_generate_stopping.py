"""A text ends where plain decoding ends it, whatever ends it, and lengths are counted as there."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from medusa_spec import MedusaModel
from medusa_spec.testing import tiny, tiny_model, tiny_tokenizer

NEW = 24


@pytest.fixture
def ids(prompt):
    return prompt(8)


@pytest.fixture
def wrapped(llama, scripted, ids):
    """Drafts are always right, so that paths are long wherever a text may end."""
    answer = llama.generate(ids, do_sample=False, max_new_tokens=60)
    return MedusaModel(llama, drafter=scripted(answer[0].tolist(), right=1.0, lone=0.0), probe=False)


@pytest.fixture(scope="module")
def speaking():
    target, tokenizer = tiny_model(), tiny_tokenizer()
    inputs = tokenizer("Grüße, 世界 and ", return_tensors="pt")
    return target, tokenizer, inputs, target.generate(**inputs, do_sample=False, max_new_tokens=70)


@pytest.fixture
def talker(speaking, scripted):
    target, tokenizer, inputs, answer = speaking
    model = MedusaModel(target, drafter=scripted(answer[0].tolist(), right=1.0, lone=0.0), probe=False)
    yield model, tokenizer, inputs, answer
    model.detach()


def check(model: MedusaModel, ids: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Both ways the same ids and random state; gives the ids."""
    results = []
    for generate in (model.generate, model.target.generate):
        torch.manual_seed(2)
        made = {name: value() if name == "stopping_criteria" else value for name, value in settings.items()}
        results.append((generate(ids, **made), torch.get_rng_state()))
    (drafted, own_state), (plain, state) = results
    assert torch.equal(drafted, plain)
    assert torch.equal(own_state, state)
    return drafted


def end_tokens(model: MedusaModel, ids: torch.Tensor, *places: int) -> list[int]:
    answer = model.target.generate(ids, do_sample=False, max_new_tokens=NEW)
    return [int(answer[0, ids.shape[1] + place]) for place in places]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("where", ["argument", "tensor", "model's config", "one number"])
def test_any_of_several_ends_ends_the_text(wrapped, ids, where, sampled):
    first, second = end_tokens(wrapped, ids, 11, 5)
    eos: Any = first if where == "one number" else [first, 127, second]
    settings = {"do_sample": sampled, "max_new_tokens": NEW, "top_k": 4}
    if where == "model's config":
        wrapped.target.generation_config.eos_token_id = eos
    else:
        settings["eos_token_id"] = torch.tensor(eos) if where == "tensor" else eos
    out = check(wrapped, ids, **settings)
    assert sampled or int(out[0, -1]) in (first, second)


def test_an_end_inside_the_prompt_ends_nothing(wrapped, ids):
    assert check(wrapped, ids, do_sample=False, max_new_tokens=6, eos_token_id=int(ids[0, -1])).shape[1] == 14


@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_stop_string_over_several_tokens_cuts_where_it_ends(talker, length):
    model, tokenizer, inputs, answer = talker
    text = tokenizer.decode(answer[0, inputs.input_ids.shape[1] :])
    for place in range(0, 24, 5):
        stop = text[place : place + length]
        settings = {"do_sample": False, "max_new_tokens": 40, "stop_strings": [stop, "never said"]}
        out = check(model, inputs.input_ids, **settings, tokenizer=tokenizer)
        assert stop in tokenizer.decode(out[0]) or "\ufffd" in stop


def test_a_stop_string_that_begins_in_the_prompt_is_found_as_in_plain_decoding(talker):
    model, tokenizer, inputs, answer = talker
    stop = "d " + tokenizer.decode(answer[0, inputs.input_ids.shape[1] :])[:1]
    settings = {"do_sample": False, "max_new_tokens": 40, "stop_strings": stop, "tokenizer": tokenizer}
    assert check(model, inputs.input_ids, **settings).shape[1] < inputs.input_ids.shape[1] + 40


@pytest.mark.parametrize("where", ["given config", "given config, by place", "model's config", "overruled"])
def test_stop_strings_count_wherever_they_are_set(talker, where):
    model, tokenizer, inputs, answer = talker
    prompt_length = inputs.input_ids.shape[1]
    stop = "&0"
    assert stop in tokenizer.decode(answer[0, prompt_length : prompt_length + 29])
    before = model.target.generation_config
    config = GenerationConfig(stop_strings=[stop], do_sample=False, max_new_tokens=30, pad_token_id=258)
    kept = config.to_dict()
    try:
        if where == "model's config":
            model.target.generation_config = config
            out = model.generate(**inputs, tokenizer=tokenizer)
        elif where == "overruled":
            model.target.generation_config = config
            out = model.generate(**inputs, stop_strings=None)
            assert out.shape[1] == prompt_length + 30
            return
        elif where == "given config":
            out = model.generate(**inputs, generation_config=config, tokenizer=tokenizer)
        else:
            out = model.generate(inputs.input_ids, config, tokenizer=tokenizer)
        assert torch.equal(out, model.target.generate(**inputs, generation_config=config, tokenizer=tokenizer))
    finally:
        model.target.generation_config = before
    assert out.shape[1] < prompt_length + 30
    assert config.to_dict() == kept


def test_a_stop_criterion_of_one_s_own_goes_before_stop_strings(talker):
    model, tokenizer, inputs, answer = talker
    text = tokenizer.decode(answer[0, inputs.input_ids.shape[1] :])

    def own() -> StoppingCriteriaList:
        return StoppingCriteriaList([StopStringCriteria(tokenizer=tokenizer, stop_strings=[text[9:12]])])

    settings = {"do_sample": False, "max_new_tokens": 40, "stop_strings": text[2:4], "tokenizer": tokenizer}
    check(model, inputs.input_ids, **settings, stopping_criteria=own)


class _Clock:
    """Every look at it is a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.parametrize("seconds", [0.5, 3.0, 7.0, 100.0])
def test_time_is_looked_at_with_every_token(wrapped, ids, seconds, monkeypatch):
    lengths = []
    for generate in (wrapped.generate, wrapped.target.generate):
        monkeypatch.setattr("transformers.generation.stopping_criteria.time", _Clock())
        lengths.append(generate(ids, do_sample=False, max_new_tokens=NEW, max_time=seconds).shape[1])
    assert lengths[0] == lengths[1]
    assert (lengths[0] < 8 + NEW) == (seconds < 50)


class _Sees(StoppingCriteria):
    """Ends a text by what it has seen: all ids, at every length once."""

    def __init__(self) -> None:
        self.sum, self.length = 0, None

    def __call__(self, input_ids, scores, **kwargs):
        assert self.length in (None, input_ids.shape[1] - 1), "one call per token"
        self.length = input_ids.shape[1]
        self.sum += int(input_ids.sum())
        return torch.full((input_ids.shape[0],), self.sum % 7 == 3)


class _Confident(StoppingCriteria):
    """Ends a text at a token that was surer than others."""

    def __call__(self, input_ids, scores, **kwargs):
        return scores[-1].softmax(-1).amax(-1) > 0.15


@pytest.mark.parametrize("sampled", [False, True])
def test_a_criterion_of_one_s_own_ends_a_text(wrapped, ids, sampled):
    settings = {"do_sample": sampled, "max_new_tokens": NEW, "top_k": 3}
    check(wrapped, ids, **settings, stopping_criteria=lambda: StoppingCriteriaList([_Sees()]))


def test_a_criterion_may_read_the_scores(wrapped, ids):
    out = []
    for generate in (wrapped.generate, wrapped.target.generate):
        settings = {"do_sample": False, "max_new_tokens": NEW, "output_scores": True, "return_dict_in_generate": True}
        out.append(generate(ids, **settings, stopping_criteria=StoppingCriteriaList([_Confident()])).sequences)
    assert torch.equal(*out)
    assert out[0].shape[1] < 8 + NEW


@pytest.mark.parametrize(
    "criteria",
    [
        lambda: StoppingCriteriaList([MaxLengthCriteria(max_length=13)]),
        lambda: StoppingCriteriaList([EosTokenCriteria(eos_token_id=list(range(2, 60)))]),
        lambda: [_Sees(), MaxLengthCriteria(max_length=19)],
    ],
    ids=["length", "ends", "a plain list"],
)
def test_criteria_of_transformers_given_by_hand_count(wrapped, ids, criteria):
    settings = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": 127}
    assert check(wrapped, ids, **settings, stopping_criteria=criteria).shape[1] < 8 + NEW


LENGTHS = {
    "max_new_tokens": {"max_new_tokens": 9},
    "max_length": {"max_length": 15},
    "both": {"max_new_tokens": 5, "max_length": 30},
    "min_length": {"max_new_tokens": 20, "min_length": 20, "eos_token_id": list(range(2, 70))},
    "min_new_tokens": {"max_new_tokens": 20, "min_new_tokens": 9, "eos_token_id": list(range(2, 70))},
    "both minima": {"max_new_tokens": 20, "min_new_tokens": 9, "min_length": 3, "eos_token_id": list(range(2, 70))},
    "one token": {"max_new_tokens": 1},
    "one more than the prompt": {"max_length": 9},
}


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_are_those_of_plain_decoding(wrapped, ids, name, sampled):
    out = check(wrapped, ids, do_sample=sampled, **LENGTHS[name])
    exact = {"max_new_tokens": 17, "max_length": 15, "both": 13, "one token": 9}
    assert out.shape[1] == exact.get(name, out.shape[1])


def test_without_any_limit_there_are_twenty_tokens_and_hugging_face_s_warning(wrapped, ids):
    for generate in (wrapped.generate, wrapped.target.generate):
        with pytest.warns(UserWarning, match="model-agnostic default"):
            assert generate(ids, do_sample=False).shape[1] == 28


@pytest.mark.parametrize("length", [3, 8])
def test_a_prompt_as_long_as_the_limit_is_hugging_face_s_error(wrapped, ids, length):
    with pytest.raises(ValueError, match="max_length") as ours:
        wrapped.generate(ids, do_sample=False, max_length=length)
    with pytest.raises(ValueError, match="max_length") as theirs:
        wrapped.target.generate(ids, do_sample=False, max_length=length)
    assert str(ours.value) == str(theirs.value)


def test_a_minimum_above_the_maximum_is_hugging_face_s_warning(wrapped, ids):
    for generate in (wrapped.generate, wrapped.target.generate):
        with pytest.warns(UserWarning, match="Unfeasible length"):
            generate(ids, do_sample=False, max_new_tokens=4, min_new_tokens=9, eos_token_id=5)


@pytest.mark.parametrize("value", [{"max_new_tokens": 0}, {"temperature": -1.0, "do_sample": True}])
def test_a_wrong_value_is_hugging_face_s_error(wrapped, ids, value):
    settings = {"max_new_tokens": 3, "do_sample": True, **value}
    with pytest.raises(ValueError) as ours:
        wrapped.generate(ids, **settings)
    with pytest.raises(ValueError) as theirs:
        wrapped.target.generate(ids, **settings)
    assert str(ours.value) == str(theirs.value)


def test_an_argument_that_nobody_knows_is_hugging_face_s_error(wrapped, ids):
    for generate in (wrapped.generate, wrapped.target.generate):
        with pytest.raises(ValueError, match="max_new_tokn"):
            generate(ids, max_new_tokn=3)


def test_an_argument_given_twice_is_an_error(wrapped, ids):
    with pytest.raises(TypeError, match="multiple values for argument 'inputs'"):
        wrapped.generate(ids, inputs=ids, max_new_tokens=3)


def test_the_model_s_own_settings_are_its_defaults(wrapped, ids):
    config = GenerationConfig(do_sample=True, top_p=0.8, temperature=1.3, max_new_tokens=14, repetition_penalty=1.2)
    wrapped.generation_config = config
    out = check(wrapped, ids)
    assert out.shape[1] == 22
    assert not torch.equal(out, check(wrapped, ids, do_sample=False, temperature=None, top_p=None))


@pytest.mark.parametrize("length", [8, 15, 16, 20])
def test_a_text_beyond_the_model_s_length_is_reminded_of_it_as_in_plain_decoding(scripted, prompt, monkeypatch, length):
    target = tiny("llama", max_position_embeddings=16)
    target.generation_config = GenerationConfig(pad_token_id=0)
    ids = prompt(length)
    told: list[str] = []
    monkeypatch.setattr("transformers.generation.stopping_criteria.logger.warning_once", told.append)
    for new in (1, 2, 14):
        told.clear()
        answer = target.generate(ids, do_sample=False, max_new_tokens=new)
        expected = set(told)
        told.clear()
        model = MedusaModel(target, drafter=scripted(answer[0].tolist(), right=1.0), probe=False)
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=new), answer)
        assert set(told) == expected and len(told) == len(expected)
        model.detach()
