"""Settings of a run."""

from typing import Any

import pytest
from transformers import LlamaConfig

from medusa_spec.errors import ConfigError
from medusa_spec.finetune.choices import LOSSES
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.distillation import TERMS
from medusa_spec.heads import options_of


def make(**changes: Any) -> FinetuneConfig:
    return FinetuneConfig(**({"model": "m", "data": ("d",), "output": "o"} | changes))


def test_settings_survive_a_round_trip() -> None:
    config = make(sources=["a", "b"], tree_size=5, kind="recurrent", options=("tied=false",), learning_rates="a=2")
    assert config.sources == ("a", "b") and FinetuneConfig.from_dict(config.to_dict()) == config


def test_options_are_those_of_the_family() -> None:
    assert make(kind="mlp_speculator", options=("inner_size=64", "tied=true")).options == {
        "inner_size": 64,
        "tied": True,
    }
    assert make(kind="recurrent", options="tied=false").options == {"tied": False}
    assert make(kind="recurrent", options={"inner_size": 3}).heads_config(hidden_size=8, vocab_size=9).options == {
        "inner_size": 3
    }


def test_options_of_a_layer_are_written_as_numbers_and_taps_as_layers() -> None:
    written = ("taps=2", "rope_theta=10000", "head_dim=8", "rms_norm_eps=1e-6")
    config = make(kind="eagle3", options=written)
    heads = config.heads_config(hidden_size=8, vocab_size=9)
    options = options_of("eagle3", heads.options)
    assert (options.layers, options.rope_theta, options.head_dim, options.rms_norm_eps) == ((2,), 1e4, 8, 1e-6)
    assert options_of("eagle3", make(kind="eagle3", options=("taps=0,3",)).options).layers == (0, 3)


def test_layers_of_the_heads_follow_the_target() -> None:
    target = LlamaConfig(hidden_size=48, num_hidden_layers=6, num_attention_heads=6, intermediate_size=80)
    found = make(kind="eagle3", options={"intermediate_size": 40}).heads_config(
        hidden_size=48, vocab_size=9, target=target
    )
    assert found.options["num_attention_heads"] == 6 and found.options["intermediate_size"] == 40
    assert found.options["taps"] == "2,3"
    assert make().heads_config(hidden_size=48, vocab_size=9, target=target).options == {}


def test_every_number_of_steps_may_be_trained_and_features_held_near() -> None:
    for unroll in (None, 1, 4):
        assert make(kind="eagle", unroll=unroll, feature_weight=0.1).unroll == unroll
    assert make(kind="hydra", unroll=4).unroll == 4  # all of them


def test_a_loss_that_learns_from_probabilities_keeps_some() -> None:
    assert make().kept_logits == 0 and make(top_logits=5).kept_logits == 5 and make(top_logits=0).kept_logits == 0
    for loss in LOSSES[1:]:
        assert make(loss=loss).kept_logits == 32 and make(loss=loss, top_logits=5).kept_logits == 5


def test_every_loss_but_the_first_is_one_against_probabilities() -> None:
    assert set(LOSSES[1:]) == set(TERMS)


def test_learning_rates_of_parts_are_written_as_factors() -> None:
    for written in (("lm_head=0.1", "heads.0=2"), {"lm_head": 0.1, "heads.0": 2}):
        assert make(learning_rates=written).learning_rates == {"lm_head": 0.1, "heads.0": 2.0}
    assert make(learning_rates="lm_head=0.1").learning_rates == {"lm_head": 0.1}


def test_one_name_is_one_data_set() -> None:
    assert make(data="chats.jsonl").data == ("chats.jsonl",)


def test_trackers_are_names_and_none_is_none() -> None:
    assert make(report_to="tensorboard").report_to == ("tensorboard",)
    assert make(report_to=["wandb", "tensorboard"]).report_to == ("wandb", "tensorboard")
    assert make(report_to="none").report_to == make().report_to == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ()}, "data must name"),
        ({"num_heads": 0}, "num_heads must be an integer of 1 or more, got 0"),
        ({"epochs": 1.5}, "epochs"),
        ({"save_steps": True}, "save_steps"),
        ({"gradient_accumulation": 0}, "gradient_accumulation must be an integer of 1 or more, got 0"),
        ({"eval_prompts": -1}, "eval_prompts must be an integer of 0 or more"),
        ({"held_out": 0.0}, "held_out must be a share"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"warmup": 1.0}, "warmup"),
        ({"depth_decay": 0.0}, "depth_decay"),
        ({"dtype": "int8"}, "dtype must be one of auto, float32.*got 'int8'"),
    ],
)
def test_a_value_out_of_range_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="learning_rat"):
        FinetuneConfig.from_dict(make().to_dict() | {"learning_rat": 1})


def test_a_draft_vocabulary_of_everything_is_none() -> None:
    assert make().heads_config(hidden_size=8, vocab_size=4096).draft_vocab_size is None
    assert make().heads_config(hidden_size=8, vocab_size=4097).draft_vocab_size == 4096


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab_size": 0}, "draft_vocab_size must be an integer of 1 or more, or None, got 0"),
        ({"draft_vocab_size": 4.5}, "draft_vocab_size"),
        ({"tree_size": -1}, "tree_size must be an integer of 0 or more, or None, got -1"),
        ({"report_prompts": 0}, "report_prompts"),
        ({"lm_head": "tied"}, "lm_head must be one of shared, own, low_rank, got 'tied'"),
        ({"seed": -1}, "seed must be an integer in 0"),
        ({"options": ("tied",)}, "options must be written name=value, got 'tied'"),
        ({"options": {"tied": True}}, "options of medusa heads must be among"),
        ({"kind": "recurrent", "options": {"tied": 1}}, "tied of recurrent heads must be bool, got 1"),
        ({"kind": "recurrent", "options": {"inner_size": 0}}, "inner_size must be an integer of 1 or more"),
        ({"kind": "eagle", "options": {"head_dim": 7}}, "head_dim must be even"),
        ({"kind": "eagle3", "options": ("taps=2,1",)}, "taps must be numbers of layers from 0 that rise"),
        ({"loss": "mse"}, "loss must be one of cross_entropy, kl, .*, got 'mse'"),
        ({"loss": "kl", "top_logits": 0}, "top_logits must be 1 or more, or None, with loss 'kl'"),
        ({"top_logits": -1}, "top_logits must be an integer of 0 or more, or None, got -1"),
        ({"ema": 1.0}, r"ema must be a decay in 0\.\.1 and below 1, or 0 for none, got 1.0"),
        ({"ema": -0.1}, "ema must be a decay"),
        ({"learning_rates": ("lm_head",)}, "learning_rates must be written part=factor"),
        ({"learning_rates": ("lm_head=fast",)}, "factor above 0, got 'lm_head': 'fast'"),
        ({"learning_rates": {"lm_head": 0}}, "factor above 0, got 'lm_head': 0"),
        ({"learning_rates": {"lm_head": True}}, "factor above 0, got 'lm_head': True"),
        ({"learning_rates": {"lm_head": float("nan")}}, "factor above 0, got 'lm_head': nan"),
        ({"learning_rates": {"": 1.0}}, "factor above 0, got ''"),
        ({"kind": "eagle", "unroll": 0}, r"unroll must be in 1\.\.4 \(num_heads\), or None, got 0"),
        ({"kind": "eagle", "unroll": 5}, r"unroll must be in 1\.\.4 .* got 5"),
        ({"kind": "eagle", "unroll": True}, "unroll must be in"),
        ({"kind": "eagle", "unroll": 2, "options": {"tied": False}}, "unroll must be None for eagle heads with these"),
        ({"kind": "hydra", "unroll": 2}, "unroll must be None for hydra heads"),
        ({"kind": "recurrent", "unroll": 2}, "unroll must be None for recurrent heads"),
        ({"kind": "eagle", "feature_weight": -1.0}, "feature_weight must be 0 or more"),
        ({"kind": "eagle", "feature_weight": float("nan")}, "feature_weight must be 0 or more"),
        (
            {"kind": "eagle3", "feature_weight": 0.1},
            "feature_weight must be .* one of eagle, fused, got 0.1 with kind 'eagle3'",
        ),
    ],
)
def test_what_would_fail_after_hours_fails_at_once(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)
