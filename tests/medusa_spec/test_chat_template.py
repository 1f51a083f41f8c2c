"""Heads and tokenizer must lay out texts alike, or say so."""

import warnings

import pytest

from medusa_spec.chat_template import chat_template_hash, check_chat_template
from medusa_spec.config import MedusaConfig
from medusa_spec.heads import HeadsConfig
from medusa_spec.testing import tiny_tokenizer


def config(trained: str | None) -> MedusaConfig:
    heads = HeadsConfig(hidden_size=8, vocab_size=16)
    return MedusaConfig(heads=heads, base_model_name_or_path="org/base", chat_template_hash=trained)


def test_the_template_of_training_passes_in_silence() -> None:
    tokenizer = tiny_tokenizer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for known in (config(chat_template_hash(tokenizer)), config(None), None):
            assert check_chat_template(known, tokenizer)


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_another_template_is_told_with_both(template: str | None) -> None:
    tokenizer = tiny_tokenizer()
    trained = chat_template_hash(tokenizer)
    tokenizer.chat_template = template
    found = chat_template_hash(tokenizer) or "no template"
    with pytest.warns(UserWarning, match=f"template {trained}, this tokenizer has {found}.*org/base"):
        assert not check_chat_template(config(trained), tokenizer)
