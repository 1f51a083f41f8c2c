"""Settings that do not go together, or would be ignored."""

from dataclasses import replace
from typing import Any

import pytest

from medusa_spec.errors import ConfigError
from medusa_spec.finetune.config import FinetuneConfig


def make(**changes: Any) -> FinetuneConfig:
    return FinetuneConfig(**({"model": "m", "data": ("d",), "output": "o"} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tree_size": 64}, "tree_size must be at most max_tree_size = 63, got 64"),
        ({"device": "cuda:1"}, "device must be a kind, like 'cuda', .*got 'cuda:1'.*CUDA_VISIBLE_DEVICES"),
        ({"data": ("self", "a.jsonl")}, "data must be 'self' alone or other names"),
        ({"data": "self", "sources": "maths"}, "sources must be None for data = 'self'"),
        ({"init_from": "x", "target_rank": 4, "loss": "kl", "epochs": 2}, "loss, epochs must be left alone with .*2"),
        ({"init_from": "x", "target_rank": 4, "states_from": "y"}, "states_from must be left alone with target_rank"),
    ],
)
def test_what_would_be_ignored_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)


def test_a_changed_copy_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="tree_size must be at most max_tree_size = 15, got 31"):
        replace(make(tree_size=31), max_tree_size=15)
    assert make(device="cuda:0").device == "cuda:0" and make(data="self", sources="self").sources == ("self",)
