"""Tokenizers have the same identity if their ids mean the same."""

from medusa_spec.testing import tiny_tokenizer
from medusa_spec.vocabulary import vocabulary_identity


def test_the_same_vocabulary_has_the_same_identity_and_another_one_has_not() -> None:
    identity = vocabulary_identity(tiny_tokenizer())
    assert identity == vocabulary_identity(tiny_tokenizer())
    assert identity.startswith(f"{len(tiny_tokenizer())} tokens, sha256 ")
    larger = tiny_tokenizer()
    larger.add_tokens(["<one more>"])
    assert vocabulary_identity(larger) != identity
