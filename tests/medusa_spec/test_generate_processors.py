"""Every logits processor of generate() does on accepted paths what it does in plain decoding, greedy and sampled."""

import inspect
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import logits_process

from medusa_spec import MedusaModel
from medusa_spec.testing import tiny

NEW = 24

ANY_END = list(range(2, 60))
"""So many tokens end the text that a minimum length matters."""

SETTINGS: dict[str, dict[str, Any]] = {
    "sequence_bias": {"sequence_bias": [[[5], 3.0], [[7, 9], -4.0], [[11, 5], 6.0]]},
    "bad_words_ids": {"bad_words_ids": [*([token] for token in range(2, 50)), [60, 61], [3, 4, 8]]},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 6.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "min_length": {"min_length": 16, "eos_token_id": ANY_END},
    "min_new_tokens": {"min_new_tokens": 7, "eos_token_id": ANY_END},
    "prefix_allowed_tokens_fn": {
        "prefix_allowed_tokens_fn": lambda row, seen: [int(seen[-1] * 3 + row + k) % 120 for k in range(1, 9)]
    },
    "forced_bos_token_id": {"forced_bos_token_id": 77},
    "forced_eos_token_id": {"forced_eos_token_id": [3], "max_new_tokens": 11},
    "remove_invalid_values": {"remove_invalid_values": True},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 9},
    "suppress_tokens": {"suppress_tokens": [*range(2, 40)]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [*range(2, 60), *range(70, 126)]},
    "renormalize_logits": {"renormalize_logits": True},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="lefthash")},
    "watermark, selfhash": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")},
    "synthid": {
        "watermarking_config": SynthIDTextWatermarkingConfig(
            ngram_len=3, keys=[654, 400, 836, 123], context_history_size=16, sampling_table_size=256
        )
    },
    "synthid, skipping": {
        "watermarking_config": SynthIDTextWatermarkingConfig(
            ngram_len=4, keys=[654, 400, 836], skip_first_ngram_calls=True, sampling_table_size=256
        )
    },
    "many": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "sequence_bias": [[[5], 2.0]], "min_new_tokens": 3},
}
"""By name, arguments of generate() with which a processor acts."""

WARPERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.3},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.3, "top_k": 0},
    "min_p": {"min_p": 0.4, "top_k": 0},
    "top_h": {"top_h": 0.2, "top_k": 0},
    "typical_p": {"typical_p": 0.3, "top_k": 0},
    "epsilon_cutoff": {"epsilon_cutoff": 0.05, "top_k": 0},
    "eta_cutoff": {"eta_cutoff": 0.05, "top_k": 0},
    "all": {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9, "renormalize_logits": True},
}
"""Arguments with which a warper acts; they are for sampling only."""

IDLE = {"remove_invalid_values", "renormalize_logits"}
"""These change no token."""

NOT_OURS = {
    "of music and pictures": {"ClassifierFreeGuidanceLogitsProcessor"},
    "of speech": {
        "AlternatingCodebooksLogitsProcessor",
        "BarkEosPrioritizerLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSChannelFilterLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
        "WhisperNoSpeechDetection",
        "WhisperTimeStampLogitsProcessor",
    },
    "refused as guidance_scale": {"UnbatchedClassifierFreeGuidanceLogitsProcessor"},
}
"""Processors that no argument of a text model's generate() makes, and the one that is refused."""


@pytest.fixture(scope="module")
def target():
    model = tiny("llama")
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return model


PROMPTS = {"forced_bos_token_id": [[1]], "encoder_no_repeat_ngram_size": [[118, 47, 12, 102, 76, 111]]}
"""Prompts at which a setting matters, where a random one would not do."""


def prompt_for(name: str, prompt: Any) -> torch.Tensor:
    return torch.tensor(PROMPTS[name]) if name in PROMPTS else prompt(9)


def decoded(generate: Any, ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, random state afterwards)"""
    torch.manual_seed(5)
    return generate(ids, **{"max_new_tokens": NEW, **kwargs}), torch.get_rng_state()


def check(target: Any, scripted: Any, ids: torch.Tensor, *, idle: bool, **settings: Any) -> None:
    """The same tokens and the same random state as plain decoding, and others than without the settings."""
    expected, state = decoded(target.generate, ids, **settings)
    without, _ = decoded(target.generate, ids, do_sample=settings["do_sample"])
    assert torch.equal(without, expected) is idle, "the setting must matter, or this test says nothing"
    model = MedusaModel(target, drafter=scripted(expected[0].tolist(), right=0.9, lone=0.0, seed=1), probe=False)
    try:
        drafted, own_state = decoded(model.generate, ids, **settings)
    finally:
        model.detach()
    assert torch.equal(drafted, expected)
    assert torch.equal(own_state, state)
    assert model.last_stats.accepted > 0


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_processor_acts_on_accepted_paths_as_in_plain_decoding(target, scripted, prompt, name, sampled):
    ids = prompt_for(name, prompt)
    check(target, scripted, ids, idle=name in IDLE, do_sample=sampled, **SETTINGS[name])


@pytest.mark.parametrize("name", WARPERS)
def test_a_warper_acts_on_accepted_paths_as_in_plain_decoding(target, scripted, prompt, name):
    check(target, scripted, prompt(9), idle=False, do_sample=True, **WARPERS[name])


def test_every_processor_of_transformers_is_tried_or_known(target, prompt):
    tried: set[str] = set()

    def note(model, input_ids, logits_processor, **kwargs):
        tried.update(type(processor).__name__ for processor in logits_processor)
        return input_ids

    for name, settings in {**SETTINGS, **WARPERS}.items():
        arguments = {"do_sample": True, "max_new_tokens": NEW, **settings}
        target.generate(prompt_for(name, prompt), custom_generate=note, **arguments)
    classes = {
        name
        for name, kind in vars(logits_process).items()
        if inspect.isclass(kind) and issubclass(kind, LogitsProcessor) and kind is not LogitsProcessor
    }
    assert classes - tried == set().union(*NOT_OURS.values())


class Grammar(LogitsProcessor):
    """An automaton that moves with each token: a call too many, too few or out of order leads it astray."""

    def __init__(self, prompt_length: int) -> None:
        self.state, self.length = 1, prompt_length

    def __call__(self, input_ids, scores):
        assert input_ids.shape[1] == self.length, "one call per token, in order"
        self.length += 1
        self.state = (self.state * 31 + int(input_ids[0, -1])) % 97
        allowed = torch.tensor([(self.state + 11 * k) % scores.shape[1] for k in range(12)])
        return scores + torch.full_like(scores, float("-inf")).index_fill(1, allowed, 0.0)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_a_grammar_with_state_of_its_own_moves_token_by_token(target, scripted, prompt, sampled):
    ids = prompt(9)

    def constrained(generate):
        processors = LogitsProcessorList([Grammar(ids.shape[1])])
        return decoded(generate, ids, do_sample=sampled, logits_processor=processors)[0]

    expected = constrained(target.generate)
    model = MedusaModel(target, drafter=scripted(expected[0].tolist(), right=0.9), probe=False)
    try:
        assert torch.equal(constrained(model.generate), expected)
    finally:
        model.detach()
    assert model.last_stats.accepted > 0


def test_a_processor_that_writes_into_the_logits_changes_no_other_node(target, scripted, prompt):
    class Writes(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, input_ids[0, -1] :] += 3.0
            return scores

    ids, settings = prompt(9), {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected = target.generate(ids, max_new_tokens=NEW, logits_processor=LogitsProcessorList([Writes()]), **settings)
    drafter = scripted(expected.sequences[0].tolist(), right=0.9)
    model = MedusaModel(target, drafter=drafter, probe=False)
    try:
        drafted = model.generate(ids, max_new_tokens=NEW, logits_processor=LogitsProcessorList([Writes()]), **settings)
    finally:
        model.detach()
    assert torch.equal(drafted.sequences, expected.sequences)
    torch.testing.assert_close(drafted.logits, expected.logits)
