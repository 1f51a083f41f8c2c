"""What no engine carries is refused with the reason."""

import pytest
import torch

from medusa_spec.errors import UnsupportedError
from medusa_spec.formats.engine_limits import check_limits


def check(heads, target, **settings):
    check_limits(heads, target, "a format", **settings)


def test_usual_heads_pass(random_heads, target) -> None:
    check(random_heads(), target)


def test_biases_of_lm_heads_are_refused(random_heads, target) -> None:
    with pytest.raises(UnsupportedError, match="medusa heads cannot be exported as a format: engines know no biases"):
        check(random_heads(lm_head="own", lm_head_bias=True), target)


def test_logits_turned_round_are_refused(random_heads, target, monkeypatch) -> None:
    monkeypatch.setattr(target, "_post_processing", lambda: (-2.0, None), raising=False)
    with pytest.raises(UnsupportedError, match=r"scales its logits by -2\.0"):
        check(random_heads(), target)


def test_states_changed_before_the_lm_head_are_refused_where_they_are_read(random_heads, target, monkeypatch) -> None:
    monkeypatch.setitem(target.__dict__, "decoder_gives_h", False)
    check(random_heads(), target, reads_h=False)
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM changes its last hidden state before the LM head"):
        check(random_heads(), target)


def test_other_rows_than_the_config_says_are_refused(random_heads, target, monkeypatch) -> None:
    heads = random_heads()
    monkeypatch.setattr(target.config, "vocab_size", 120)
    with pytest.raises(UnsupportedError, match="says vocab_size = 120, its logits are 128"):
        check(heads, target)


def test_a_llama_hands_out_what_its_lm_head_reads(target) -> None:
    assert target.decoder_gives_h and torch.is_tensor(target.lm_head.weight)
