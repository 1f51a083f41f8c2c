"""Paths as rows are plain decoding of every path; what was accepted in part is read again."""

import pytest
import torch

from medusa_spec.routes import PathsRoute

EXACT = {"rtol": 0, "atol": 1e-5}


@pytest.mark.parametrize("name", ["qwen3_next", "rwkv", "bloom"])
@pytest.mark.parametrize("length", [2, 29])
def test_a_tree_pass_is_plain_decoding_of_every_path(make_other, text, name, length) -> None:
    asked = text(make_other(name), PathsRoute, length)
    for path in ((0, 3, 4), (0,), (0, 1, 2, 5), (0, 1)):
        torch.testing.assert_close(asked.tree(), asked.expected(), **EXACT)
        asked.keep(path)
    assert asked.cache.lengths == [asked.plain.ids.shape[1]]


def test_models_with_windows_are_served_too(make_model, text) -> None:
    asked = text(make_model("gemma3"), PathsRoute, 29)
    for _ in range(3):
        torch.testing.assert_close(asked.tree(), asked.expected(), **EXACT)
        asked.keep((0, 3, 4))


def test_a_path_that_was_accepted_whole_is_not_read_again(make_other, text, monkeypatch) -> None:
    asked = text(make_other("bloom"), PathsRoute)
    asked.tree()
    monkeypatch.setattr(asked.backbone.model, "forward", None)
    asked.cache.keep(0, (0, 1, 2, 5))
    assert asked.cache.lengths == [17]
