"""What configs say of positions: how far a text and a tree may go, and where rotary factors change."""

from types import SimpleNamespace

import pytest
from transformers import GPT2Config, LlamaConfig

from medusa_spec import positions


def rotary(**rope):
    return LlamaConfig(max_position_embeddings=100, rope_parameters={"rope_theta": 1e4, **rope})


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


def test_learnt_positions_end_with_their_table():
    config = GPT2Config(n_positions=50)
    assert positions.longest(config) == 50 and not positions.rescaled(config)
    assert [positions.deepest(config, length) for length in (0, 48, 49, 60)] == [49, 1, 0, 0]


def test_computed_positions_have_no_end():
    config = rotary(rope_type="default")
    assert positions.longest(config) is None and positions.deepest(config, 10**6) is None
    assert not positions.rescaled(config) and positions.longrope_edge(config) is None


@pytest.mark.parametrize(
    ("rope", "edge", "beyond"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 100, 0),
        ({**LONGROPE, "original_max_position_embeddings": 40}, 40, None),
    ],
    ids=["dynamic", "longrope"],
)
def test_no_draft_reaches_where_positions_are_rescaled(rope, edge, beyond):
    config = SimpleNamespace(rope_parameters=rope, max_position_embeddings=100)
    assert positions.rescaled(config)
    assert [positions.deepest(config, length) for length in (0, edge - 1, edge)] == [edge - 1, 0, beyond]
    assert positions.longrope_edge(config) == (edge if rope["rope_type"] == "longrope" else None)


def test_layers_of_one_kind_may_be_rescaled_where_others_are_not():
    kinds = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}
    config = SimpleNamespace(rope_parameters=kinds, max_position_embeddings=30)
    assert positions.rescaled(config) and positions.deepest(config, 20) == 9


def test_of_several_bounds_the_least_holds():
    kinds = {
        "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 40},
        "sliding_attention": {"rope_type": "dynamic", "original_max_position_embeddings": 30},
    }
    for layers in (kinds, dict(reversed(kinds.items()))):
        config = SimpleNamespace(rope_parameters=layers, max_position_embeddings=100)
        assert [positions.deepest(config, length) for length in (20, 29, 35, 50)] == [9, 0, 0, 0]
        assert positions.longrope_edge(config) == 40
