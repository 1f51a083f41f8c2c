"""Heads that training goes on from say their own shape."""

from pathlib import Path

import pytest

from medusa_spec.errors import ConfigError
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.given_heads import check_shape, shaped_as_given


def test_what_is_not_said_is_theirs(finished: FinetuneConfig) -> None:
    given = str(Path(finished.output) / "heads")
    shaped = shaped_as_given({"init_from": given, "epochs": 1})
    assert (shaped["kind"], shaped["num_heads"], shaped["draft_vocab_size"], shaped["epochs"]) == ("medusa", 3, 64, 1)
    assert shaped_as_given({"epochs": 1}) == {"epochs": 1}


@pytest.mark.parametrize(("name", "value"), [("num_heads", 2), ("kind", "hydra"), ("draft_vocab_size", 65)])
def test_what_is_said_otherwise_is_refused(finished: FinetuneConfig, name: str, value: object) -> None:
    given = str(Path(finished.output) / "heads")
    with pytest.raises(ConfigError, match=f"{name} must be that of init_from = .*, got {value!r}"):
        shaped_as_given({"init_from": given, name: value})


def test_shapes_are_compared_by_name(finished: FinetuneConfig) -> None:
    theirs = finished.heads_config(hidden_size=32, vocab_size=100)
    check_shape(theirs, theirs, "x")
    ours = FinetuneConfig(model="m", data=("d",), output="o", num_heads=3, lm_head="own")
    with pytest.raises(ConfigError, match="lm_head must be that of init_from = 'x', which is 'shared', got 'own'"):
        check_shape(ours.heads_config(hidden_size=32, vocab_size=100), theirs, "x")
