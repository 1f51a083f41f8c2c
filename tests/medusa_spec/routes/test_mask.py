"""A tree as a mask says the same as the tree in attention."""

import pytest
import torch

from medusa_spec.attention import TreePass
from medusa_spec.errors import UnsupportedError
from medusa_spec.routes import MaskRoute
from medusa_spec.routes.mask import tree_mask

EXACT = {"rtol": 0, "atol": 1e-6}


@pytest.mark.parametrize("length", [3, 29])
def test_a_tree_pass_is_plain_decoding_of_every_path(make_other, text, length) -> None:
    asked = text(make_other("falcon"), MaskRoute, length)
    torch.testing.assert_close(asked.tree(), asked.expected(), **EXACT)
    asked.keep((0, 3, 4))
    torch.testing.assert_close(asked.tree(), asked.expected(), **EXACT)


@pytest.mark.parametrize("name", ["mistral-window", "gemma3"])
def test_windows_move_with_depth(make_model, text, name) -> None:
    asked = text(make_model(name), MaskRoute, 29)
    for _ in range(4):
        torch.testing.assert_close(asked.tree(), asked.expected(), **EXACT)
        asked.keep((0, 1, 2, 5))


def test_slots_that_a_node_does_not_see_are_masked(make_model, text, bush) -> None:
    asked = text(make_model("llama"), MaskRoute, 5)
    asked.cache.make_room(bush.size)
    tree_pass = TreePass(shape=bush, cache=asked.cache, device=torch.device("cpu"))
    seen = tree_mask(tree_pass, 0, torch.float64)[0, 0] == 0
    assert seen[:, :5].all()
    assert torch.equal(seen[:, 5:], bush.mask)


def test_passes_of_another_form_are_refused(make_model, text) -> None:
    route = text(make_model("llama"), MaskRoute).backbone.route
    with pytest.raises(UnsupportedError, match="use a TreePass"):
        route.verify(torch.zeros(1, 1, dtype=torch.long), object())
