"""Names a tokenizer by what its ids mean. Knows no model."""

import hashlib
import json

from transformers import PreTrainedTokenizerBase


def vocabulary_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """The number of tokens and a hash of them with their ids: equal where ids mean the same."""
    tokens = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    return f"{len(tokens)} tokens, sha256 {digest[:16]}"
