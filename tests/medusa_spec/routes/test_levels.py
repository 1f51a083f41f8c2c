"""Levels and nodes are plain decoding of every path, whatever the model keeps."""

import pytest
import torch

from medusa_spec.routes import LevelsRoute, NodesRoute

EXACT = {"rtol": 0, "atol": 1e-6}


@pytest.mark.parametrize("name", ["mamba", "qwen3_next", "bloom"])
def test_a_tree_pass_is_plain_decoding_of_every_path(make_other, text, name) -> None:
    asked = text(make_other(name), LevelsRoute)
    for path in ((0, 3, 4), (0,), (0, 1, 2, 5)):
        torch.testing.assert_close(asked.tree(), asked.expected(), **EXACT)
        asked.keep(path)
    assert asked.cache.lengths == [asked.plain.ids.shape[1]]


def test_nodes_serve_models_whose_state_cannot_be_held_for_several_rows(make_other, text) -> None:
    asked = text(make_other("rwkv"), NodesRoute)  # its passes of one token mix the rows of a batch
    for path in ((0, 3, 4), (0,), (0, 1, 2, 5)):
        assert torch.equal(asked.tree(), asked.expected())
        asked.keep(path)


def test_what_is_not_kept_leaves_no_trace(make_other, text) -> None:
    asked = text(make_other("mamba"), LevelsRoute)
    assert torch.equal(asked.tree(), asked.tree())


def test_only_the_last_node_is_returned_where_no_more_is_asked(make_other, text) -> None:
    asked = text(make_other("mamba"), LevelsRoute)
    assert torch.equal(asked.tree(last_only=True), asked.tree()[-1:])
