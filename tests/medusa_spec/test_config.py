import json
from dataclasses import replace
from typing import Any

import pytest

from medusa_spec.config import FORMAT_VERSION, OPTIONAL, MedusaConfig
from medusa_spec.errors import CheckpointError
from medusa_spec.heads import HeadsConfig
from medusa_spec.tree import Growth, PathValues, TreeTemplate

CONFIG = MedusaConfig(
    heads=HeadsConfig(hidden_size=8, vocab_size=50, num_heads=2),
    base_model_name_or_path="org/base",
    base_revision="main",
    lm_head_hash="0123",
    chat_template_hash="4567",
    tree=TreeTemplate(paths=((0,), (0, 1), (1,))),
    growth=Growth(token_seconds=0.01, level_seconds=0.001, pass_seconds=((1, 0.02), (8, 0.03)), hit=0.7, width=3),
    values=PathValues(total=10, counts={(0,): 4, (0, 1): 2, (1,): 1}, singles=((4, 1), (3, 2))),
    training={"data": {"tokens": 1000}, "note": "größer"},
)


RULES = CONFIG.to_dict()["growth"]


@pytest.mark.parametrize("config", [CONFIG, MedusaConfig(heads=CONFIG.heads)], ids=["full", "least"])
def test_a_config_survives_json(config: MedusaConfig) -> None:
    assert MedusaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_every_field_is_written_and_those_of_adapters_where_there_are_some() -> None:
    assert set(CONFIG.to_dict()) == set(MedusaConfig.__dataclass_fields__) - set(OPTIONAL)
    adapted = replace(CONFIG, **{name: name for name in OPTIONAL})
    assert set(adapted.to_dict()) == set(MedusaConfig.__dataclass_fields__)
    assert MedusaConfig.from_dict(json.loads(json.dumps(adapted.to_dict()))) == adapted


def test_a_later_version_is_refused_with_both_numbers() -> None:
    later = {**CONFIG.to_dict(), "format_version": FORMAT_VERSION + 1}
    with pytest.raises(CheckpointError, match=rf"at most {FORMAT_VERSION}, .* got {FORMAT_VERSION + 1}; upgrade"):
        MedusaConfig.from_dict(later)


@pytest.mark.parametrize("version", [None, "1", 1.0])
def test_a_version_that_is_no_number_is_refused(version: object) -> None:
    with pytest.raises(CheckpointError, match="format_version"):
        MedusaConfig.from_dict({**CONFIG.to_dict(), "format_version": version})


def test_unknown_keys_are_named() -> None:
    with pytest.raises(CheckpointError, match="unknown keys .*'typo'"):
        MedusaConfig.from_dict({**CONFIG.to_dict(), "typo": 1})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"heads": None}, "malformed"),
        ({"heads": {"hidden_size": 8}}, "vocab_size"),
        ({"heads": {"hidden_size": 0, "vocab_size": 5}}, "hidden_size"),
        ({"heads": {"hidden_size": 8, "vocab_size": 5, "typo": 1}}, "typo"),
        ({"tree": [[0], [1, 0]]}, r"\(1,\) is missing"),
        ({"tree": 3}, "malformed"),
        ({"values": {"total": 3}}, "counts"),
        ({"growth": 3}, "malformed"),
        ({"growth": {"token_seconds": 1.0}}, "level_seconds"),
        ({"growth": RULES | {"typo": 1}}, "typo"),
        ({"growth": RULES | {"pass_seconds": [[1, 0.02]]}}, "pass_seconds must hold two or more sizes"),
        ({"growth": RULES | {"pass_seconds": [1, 2]}}, "malformed"),
        ({"growth": RULES | {"pass_seconds": None}}, "malformed"),
        ({"growth": RULES | {"hit": 1.5}}, "hit must be in"),
        ({"growth": RULES | {"token_seconds": "1"}}, "malformed"),
        ({"growth": RULES | {"beam": 2.5}}, "beam must be an integer"),
        ({"values": {"total": 0, "counts": [], "singles": []}}, "total"),
    ],
)
def test_a_part_that_cannot_be_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        MedusaConfig.from_dict({**CONFIG.to_dict(), **change})


def test_heads_may_not_be_left_out() -> None:
    values = CONFIG.to_dict()
    del values["heads"]
    with pytest.raises(CheckpointError, match="heads"):
        MedusaConfig.from_dict(values)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tree": [[0], [0, 0], [0, 0, 0]]}, "tree must be at most 2 deep, .* got depth 3"),
        ({"values": {"total": 9, "counts": [], "singles": [[1]] * 3}}, "values must be at most 2 deep, .* got depth 3"),
        ({"values": {"total": 9, "counts": [], "singles": [[1], [1, 2]]}}, r"as many ranks .* got \[1, 2\]"),
        ({"values": {"total": 9, "counts": [[[0], 10]], "singles": [[1]]}}, r"in 0\.\.9 \(total\), got 10"),
        ({"values": {"total": 9, "counts": [[[0], "a"]], "singles": [[1]]}}, "malformed"),
        ({"format_version": 0}, "format_version"),
        ({"format_version": True}, "format_version"),
    ],
)
def test_what_would_fail_in_the_middle_of_decoding_fails_on_loading(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        MedusaConfig.from_dict({**CONFIG.to_dict(), **change})


def test_a_tree_without_nodes_is_kept_apart_from_none() -> None:
    config = MedusaConfig(heads=CONFIG.heads, tree=TreeTemplate(paths=()))
    assert MedusaConfig.from_dict(json.loads(json.dumps(config.to_dict()))).tree == TreeTemplate(paths=())


@pytest.mark.parametrize(
    "change",
    [{"tree": [[rank] for rank in range(51)]}, {"values": {"total": 9, "counts": [], "singles": [[0] * 51]}}],
    ids=["tree", "values"],
)
def test_more_ranks_than_there_are_draft_tokens_are_refused_with_both_numbers(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="ranks below 50, .* got 50"):
        MedusaConfig.from_dict({**CONFIG.to_dict(), **change})


def test_a_config_of_an_earlier_version_has_no_rules_of_growth() -> None:
    values = CONFIG.to_dict()
    del values["growth"]
    assert MedusaConfig.from_dict(values).growth is None
