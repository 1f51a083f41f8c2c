import json

import pytest

from medusa_spec.heads import HeadsConfig

CONFIG = HeadsConfig(
    hidden_size=8, vocab_size=50, num_heads=3, num_layers=2, lm_head="low_rank", rank=4, draft_vocab_size=20
)


def test_a_config_survives_json() -> None:
    assert HeadsConfig.from_dict(json.loads(json.dumps(CONFIG.to_dict()))) == CONFIG


def test_options_survive_json_and_are_left_out_where_there_are_none() -> None:
    options = {"tied": True, "inner_size": None}
    config = HeadsConfig(hidden_size=8, vocab_size=50, kind="recurrent", options=options)
    assert HeadsConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.to_dict()["options"] == options and hash(config) == hash(config)
    assert "options" not in CONFIG.to_dict()  # what earlier versions wrote


def test_options_go_by_name() -> None:
    with pytest.raises(ValueError, match=r"options must be a dict of settings by name, got \['tied=true'\]"):
        HeadsConfig(hidden_size=8, vocab_size=50, options=["tied=true"])


def test_draft_tokens_are_the_draft_vocabulary_or_all() -> None:
    assert CONFIG.num_draft_tokens == 20
    assert HeadsConfig(hidden_size=8, vocab_size=50).num_draft_tokens == 50


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_heads", "num_layers", "rank"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_a_size_that_is_no_positive_integer_is_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer of 1 or more, got"):
        HeadsConfig(**{"hidden_size": 8, "vocab_size": 50, name: value})


@pytest.mark.parametrize("size", [0, 51])
def test_a_draft_vocabulary_fits_the_vocabulary(size: int) -> None:
    with pytest.raises(ValueError, match=rf"draft_vocab_size must be in 1\.\.50 .* got {size}"):
        HeadsConfig(hidden_size=8, vocab_size=50, draft_vocab_size=size)


def test_an_unknown_lm_head_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="shared, own, low_rank, got 'tied'"):
        HeadsConfig(hidden_size=8, vocab_size=50, lm_head="tied")


def test_unknown_and_missing_keys_are_named() -> None:
    with pytest.raises(ValueError, match="'num_head'"):
        HeadsConfig.from_dict({**CONFIG.to_dict(), "num_head": 3})
    with pytest.raises(ValueError, match=r"must have \['vocab_size'\]"):
        HeadsConfig.from_dict({"hidden_size": 8})


def test_a_linear_residual_is_for_hydra_heads() -> None:
    assert HeadsConfig(hidden_size=8, vocab_size=50, kind="hydra", residual="linear").residual == "linear"
    with pytest.raises(ValueError, match="residual must be 'identity' for medusa heads"):
        HeadsConfig(hidden_size=8, vocab_size=50, residual="linear")
    with pytest.raises(ValueError, match="identity, linear, got 'gated'"):
        HeadsConfig(hidden_size=8, vocab_size=50, kind="hydra", residual="gated")


@pytest.mark.parametrize(("lm_head", "bias"), [("shared", True), ("low_rank", False), ("own", 1)])
def test_a_bias_is_asked_for_own_lm_heads_only(lm_head: str, bias: object) -> None:
    with pytest.raises(ValueError, match=f"lm_head_bias must be True or False with lm_head='own'.* got {bias!r}"):
        HeadsConfig(hidden_size=8, vocab_size=50, lm_head=lm_head, lm_head_bias=bias)
