"""No option of generate() is ignored in silence: each is the same, refused by name, or read by nobody there either."""

import inspect
import logging

import pytest
import torch
from transformers import CompileConfig, DynamicCache, GenerationConfig
from transformers.generation import GenerationMixin

from medusa_spec import MedusaModel
from medusa_spec.errors import UnsupportedError
from medusa_spec.generate_options import ARGUMENTS, CONFIG_OPTIONS, Settings, unknown_options

ASKED = {
    "num_beams": 2,
    "use_mtp": True,
    "cache_implementation": "offloaded",
    "token_healing": True,
    "guidance_scale": 1.5,
    "is_assistant": True,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "constraints": ["something"],
    "force_words_ids": [[5]],
}
"""For each option that is refused on its own, a value that asks for it."""

TOGETHER = {"use_cache": {"use_cache": False, "output_hidden_states": True, "return_dict_in_generate": True}}
"""Options refused together with others."""


@pytest.fixture
def ids(prompt):
    return prompt(7)


@pytest.fixture
def wrapped(llama, scripted, ids):
    answer = llama.generate(ids, do_sample=False, max_new_tokens=24)
    return MedusaModel(llama, drafter=scripted(answer[0].tolist(), right=0.9), probe=False)


def test_every_setting_of_transformers_is_in_the_table():
    assert unknown_options(GenerationConfig()) == set()


def test_every_argument_of_generate_is_in_the_table():
    named = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    assert named <= set(ARGUMENTS)


def test_a_setting_that_the_table_does_not_know_is_noticed():
    config = GenerationConfig()
    config.brand_new = None
    assert unknown_options(config) == {"brand_new"}


def test_every_refused_setting_is_tried_below():
    refused = {name for name, option in CONFIG_OPTIONS.items() if option.refused is not None}
    assert refused == set(ASKED) | set(TOGETHER)


@pytest.mark.parametrize("name", [*ASKED, *TOGETHER])
@pytest.mark.parametrize("where", ["argument", "given config", "model's config"])
def test_a_setting_is_refused_wherever_it_comes_from(wrapped, ids, name, where):
    settings = TOGETHER.get(name, {name: ASKED.get(name)})
    kwargs = {"max_new_tokens": 3, "do_sample": False}
    if where == "argument":
        kwargs |= settings
    else:
        config = GenerationConfig(pad_token_id=0, **kwargs)
        for key, value in settings.items():
            setattr(config, key, value)
        kwargs = {} if where == "model's config" else {"generation_config": config}
        if where == "model's config":
            wrapped.target.generation_config = config
    with pytest.raises(UnsupportedError, match=name):
        wrapped.generate(ids, **kwargs)


@pytest.mark.parametrize("kind", ["static", "offloaded", "offloaded_static", "quantized", "paged"])
def test_a_cache_of_another_kind_is_refused_by_its_name(wrapped, ids, kind):
    with pytest.raises(UnsupportedError, match=f"cache_implementation='{kind}'"):
        wrapped.generate(ids, max_new_tokens=3, cache_implementation=kind)


@pytest.mark.parametrize("name", [name for name, option in ARGUMENTS.items() if option.refused is not None])
def test_an_argument_that_cannot_be_speculated_is_refused_by_name(wrapped, ids, name):
    with pytest.raises(UnsupportedError, match=name):
        wrapped.generate(ids, max_new_tokens=3, **{name: torch.ones(1, 7, 32)})


QUIET = {
    "num_beams": 1,
    "use_mtp": False,
    "cache_implementation": "dynamic",
    "token_healing": False,
    "guidance_scale": 1,
    "is_assistant": False,
    "penalty_alpha": 0.0,
    "use_cache": False,
}


@pytest.mark.parametrize("name", QUIET)
def test_a_value_that_asks_for_nothing_is_taken(wrapped, ids, name):
    settings = {"max_new_tokens": 6, "do_sample": False, name: QUIET[name]}
    assert torch.equal(wrapped.generate(ids, **settings), wrapped.target.generate(ids, **settings))


@pytest.mark.parametrize("kind", ["static", "sliding_window", "hybrid_chunked", "hybrid"])
def test_a_static_cache_that_only_the_model_s_config_asks_for_is_left_out(wrapped, ids, kind, monkeypatch):
    """Nobody asked for it in this call, and it changes no token."""
    settings, told = {"max_new_tokens": 6, "do_sample": False}, []
    expected = wrapped.target.generate(ids, **settings)
    made = []
    monkeypatch.setattr(type(wrapped.target), "_prepare_static_cache", lambda *args, **kwargs: made.append(kwargs))
    monkeypatch.setattr("medusa_spec.generate_options.logger.warning_once", told.append)
    wrapped.target.generation_config.cache_implementation = kind
    for more in ({}, {"generation_config": GenerationConfig(pad_token_id=0)}):
        out = wrapped.generate(ids, **settings, **more, return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected) and type(out.cache) is DynamicCache
    assert made == [] and len(told) == (0 if kind == "hybrid" else 2)
    if kind != "hybrid":
        with pytest.raises(UnsupportedError, match=kind):
            wrapped.generate(ids, **settings, generation_config=GenerationConfig(cache_implementation=kind))


def test_a_kind_of_cache_that_hugging_face_unsets_is_none(wrapped, ids):
    settings = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "hybrid"}
    assert torch.equal(wrapped.generate(ids, **settings), wrapped.target.generate(ids, **settings))


def test_states_that_nobody_gets_are_not_refused(wrapped, ids):
    settings = {"max_new_tokens": 6, "do_sample": False, "use_cache": False, "output_hidden_states": True}
    assert torch.equal(wrapped.generate(ids, **settings), wrapped.target.generate(ids, **settings))


def test_arguments_go_before_the_given_config_and_that_before_the_model_s(llama):
    llama.generation_config = GenerationConfig(num_beams=4, top_k=7, use_mtp=True)
    config = GenerationConfig(num_beams=3, use_mtp=False)
    settings = Settings({"num_beams": 2, "generation_config": config}, llama)
    assert (settings.num_beams, settings.use_mtp, settings.top_k) == (2, False, 7)
    assert settings.dola_layers is None
    assert Settings({"top_k": None}, llama).top_k is None


def test_a_compile_config_without_effect_is_told(wrapped, ids, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        wrapped.generate(ids, max_new_tokens=3, do_sample=False, compile_config=CompileConfig())
    assert "compile_config is not used" in caplog.text


def test_the_documentation_prints_the_tables(repository_root):
    text = (repository_root / "docs" / "generate.md").read_text(encoding="utf-8")
    rows = [
        f"| `{name}` | {option.treatment} | {option.words} |"
        for table in (ARGUMENTS, CONFIG_OPTIONS)
        for name, option in table.items()
    ]
    missing = [row for row in rows if row not in text]
    assert not missing, "docs/generate.md should hold\n" + "\n".join(missing)
