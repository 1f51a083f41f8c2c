"""A user's cache goes in and out of generate() as in plain decoding, and plain decoding can go on with it."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from medusa_spec import MedusaModel, NgramDrafter
from medusa_spec.errors import ConfigError, UnsupportedError

NAMES = ["llama", "mistral-window", "gemma3"]
TURNS = [(9, 12), (5, 3), (1, 14), (13, 6)]
"""Tokens said and answered, turn by turn; windows of 8 are left behind."""


@pytest.fixture(params=NAMES)
def model(request, make_model):
    return MedusaModel(make_model(request.param), drafter=NgramDrafter(min_ngram=1), probe=False)


def conversation(model: MedusaModel, prompt: Any, cache: Any, speakers: str, *, sampled: bool = False) -> list[int]:
    """All ids, each turn spoken by the drafted (d) or the plain (p) loop, all in one cache."""
    text = torch.empty(1, 0, dtype=torch.long)
    torch.manual_seed(3)
    for turn, (said, answered) in enumerate(TURNS):
        text = torch.cat([text, prompt(said, turn)], dim=1)
        generate = model.generate if speakers[turn] == "d" else model.target.generate
        mask = torch.ones_like(text)  # or a pad token that was said would be taken for padding
        text = generate(text, attention_mask=mask, do_sample=sampled, max_new_tokens=answered, cache=cache)
        assert cache.get_seq_length() == text.shape[1] - 1
    return text[0].tolist()


def states_after(model: MedusaModel, cache: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the next token can see of a cache, per layer."""
    found = []
    for layer in cache.layers:
        window = getattr(layer, "sliding_window", None)
        kept = layer.keys.shape[2] if window is None else min(layer.keys.shape[2], window - 1)
        found.append((layer.keys[:, :, -kept:], layer.values[:, :, -kept:]))
    return found


@pytest.mark.parametrize(("speakers", "sampled"), [("dddd", False), ("dpdp", True), ("pddp", False)])
def test_a_conversation_in_one_cache_is_the_same_whoever_speaks(model, prompt, speakers, sampled):
    plain, own = DynamicCache(config=model.target.config), DynamicCache(config=model.target.config)
    expected = conversation(model, prompt, plain, "pppp", sampled=sampled)
    assert conversation(model, prompt, own, speakers, sampled=sampled) == expected
    torch.testing.assert_close(states_after(model, own), states_after(model, plain))


@pytest.mark.parametrize("speakers", ["dddd", "pdpd"])
def test_a_cache_made_without_a_config_serves_too(model, prompt, speakers):
    expected = conversation(model, prompt, DynamicCache(), "pppp")
    assert conversation(model, prompt, DynamicCache(), speakers) == expected


def test_a_returned_cache_is_gone_on_with_by_either_loop(model, prompt):
    settings = {"do_sample": False, "max_new_tokens": 13, "return_dict_in_generate": True}

    def talk(first: Any, second: Any) -> list[int]:
        one = first(prompt(11), **settings)
        assert type(one.cache) is DynamicCache and one.past_key_values is one.cache
        text = torch.cat([one.sequences, prompt(4, 1)], dim=1)
        two = second(text, **settings, cache=one.cache)
        assert two.cache is one.cache
        return two.sequences[0].tolist()

    plain, own = model.target.generate, model.generate
    expected = talk(plain, plain)
    assert talk(own, plain) == talk(plain, own) == talk(own, own) == expected


def test_an_answer_is_taken_back_and_given_anew(make_model, prompt):
    """Of full layers: a sliding one has forgotten what a crop would need, in plain decoding as well."""
    model = MedusaModel(make_model("llama"), drafter=NgramDrafter(min_ngram=1), probe=False)

    def talk(generate: Any) -> list[int]:
        cache = DynamicCache(config=model.target.config)
        text = generate(prompt(9), do_sample=False, max_new_tokens=10, cache=cache)
        cache.crop(-7)
        again = torch.cat([text[:, :12], prompt(3, 1)], dim=1)
        return generate(again, do_sample=False, max_new_tokens=10, cache=cache)[0].tolist()

    assert talk(model.generate) == talk(model.target.generate)


def test_the_older_name_is_taken_as_well(model, prompt):
    def talk(generate: Any) -> tuple[list[int], int]:
        cache = DynamicCache(config=model.target.config)
        with pytest.warns(FutureWarning, match="past_key_values"):
            out = generate(prompt(9), do_sample=False, max_new_tokens=6, past_key_values=cache)
        return out[0].tolist(), cache.get_seq_length()

    assert talk(model.generate) == talk(model.target.generate)
    both = {"past_key_values": DynamicCache(config=model.target.config), "cache": None}
    with pytest.warns(FutureWarning, match="past_key_values"):
        model.generate(prompt(9), do_sample=False, max_new_tokens=6, **both)
    assert both["past_key_values"].get_seq_length() == 14


@pytest.mark.parametrize(("padding", "returned"), [(2, False), (6, True)])
def test_plain_decoding_goes_on_with_the_cache_of_a_padded_prompt(model, prompt, returned, padding):
    first, more = torch.cat([torch.zeros(1, padding, dtype=torch.long), prompt(5)], dim=1), prompt(3, 1)
    mask = (torch.arange(padding + 5) >= padding).long()[None]

    def talk(generate: Any, answered: int) -> tuple[list[int], Any]:
        cache = None if returned else DynamicCache(config=model.target.config)
        settings = {"do_sample": False, "max_new_tokens": answered, "return_dict_in_generate": True}
        one = generate(first, attention_mask=mask, cache=cache, **settings)
        states = states_after(model, one.cache)
        text = torch.cat([one.sequences, more], dim=1)
        whole = torch.cat([mask, torch.ones(1, text.shape[1] - mask.shape[1], dtype=torch.long)], dim=1)
        two = model.target.generate(text, attention_mask=whole, cache=one.cache, do_sample=False, max_new_tokens=9)
        return two[0].tolist(), [keys.shape for keys, _ in states]

    for answered in (1, 15):
        assert talk(model.generate, answered) == talk(model.target.generate, answered)


def test_a_padded_text_in_a_cache_is_refused(model, prompt):
    cache, text = DynamicCache(config=model.target.config), prompt(9)
    mask = (torch.arange(9) >= 2).long()[None]
    model.generate(text, attention_mask=mask, do_sample=False, max_new_tokens=4, cache=cache)
    with pytest.raises(UnsupportedError, match="padded"):
        whole = torch.cat([mask, torch.ones(1, 8, dtype=torch.long)], dim=1)
        model.generate(prompt(17, 1), attention_mask=whole, do_sample=False, max_new_tokens=4, cache=cache)


def test_without_a_cache_the_text_is_the_same_and_none_is_returned(model, prompt):
    settings = {"do_sample": False, "max_new_tokens": 9, "return_dict_in_generate": True, "use_cache": False}
    plain, drafted = model.target.generate(prompt(9), **settings), model.generate(prompt(9), **settings)
    assert torch.equal(drafted.sequences, plain.sequences)
    assert drafted.cache is None and plain.cache is None


def offloading(cache: DynamicCache) -> DynamicCache:
    cache.offloading = True  # to ask for it takes a GPU
    return cache


OTHERS = {
    "StaticCache": lambda config: StaticCache(config=config, max_cache_len=64),
    "EncoderDecoderCache": lambda config: EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config)),
    "offloading": lambda config: offloading(DynamicCache(config=config)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_cache_that_cannot_be_read_is_refused_by_name_and_left_alone(llama, prompt, name):
    model = MedusaModel(llama, drafter=NgramDrafter(), probe=False)
    cache = OTHERS[name](llama.config)
    with pytest.raises(UnsupportedError, match=name):
        model.generate(prompt(5), max_new_tokens=4, cache=cache)
    cache.offloading = False
    assert cache.get_seq_length() == 0


def test_a_cache_of_another_model_is_an_error_with_both_numbers(make_model, prompt):
    model = MedusaModel(make_model("llama"), drafter=NgramDrafter(), probe=False)
    other = make_model("llama", num_hidden_layers=3)
    cache = DynamicCache(config=other.config)
    other(prompt(4), cache=cache)
    with pytest.raises(ConfigError, match=r"3.*2 layers"):
        model.generate(prompt(5), max_new_tokens=4, cache=cache)


def test_a_cache_of_several_rows_is_an_error(make_model, prompt):
    model = MedusaModel(make_model("llama"), drafter=NgramDrafter(), probe=False)
    cache = DynamicCache(config=model.target.config)
    model.target(prompt(4).repeat(2, 1), cache=cache)
    with pytest.raises(ConfigError, match="2 rows"):
        model.generate(prompt(5), max_new_tokens=4, cache=cache)


def test_a_cache_beside_a_kind_of_cache_is_hugging_face_s_error(llama, prompt):
    model = MedusaModel(llama, drafter=NgramDrafter(), probe=False)
    arguments = {"max_new_tokens": 4, "cache_implementation": "dynamic", "cache": DynamicCache(config=llama.config)}
    for generate in (model.generate, model.target.generate):
        with pytest.raises(ValueError, match="only one of the two"):
            generate(prompt(5), **arguments)
