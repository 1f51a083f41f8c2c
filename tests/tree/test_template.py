import json
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.tree import TreeTemplate, chain_template

RANK_PATHS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6)


def close(paths: list[list[int]]) -> list[tuple[int, ...]]:
    """All prefixes of the paths."""
    return sorted({tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)})


@given(RANK_PATHS, st.randoms(use_true_random=False))
def test_the_order_of_the_input_changes_nothing(paths: list[list[int]], rng: random.Random) -> None:
    closed = close(paths)
    shuffled = rng.sample(closed, len(closed))
    one, other = TreeTemplate(paths=tuple(closed)), TreeTemplate(paths=tuple(shuffled))
    assert one == other and one.paths == other.paths and one.shape == other.shape


@given(RANK_PATHS)
def test_node_i_plus_one_is_path_i(paths: list[list[int]]) -> None:
    template = TreeTemplate(paths=tuple(close(paths)))
    for node, path in enumerate(template.paths, start=1):
        assert template.shape.depths[node] == len(path)
        above = template.shape.parents[node]
        assert (template.paths[above - 1] if above else ()) == path[:-1]


@given(RANK_PATHS)
def test_depth_and_width_are_the_heads_and_guesses_that_paths_use(paths: list[list[int]]) -> None:
    template = TreeTemplate(paths=tuple(close(paths)))
    assert template.depth == max((len(path) for path in paths), default=0)
    assert template.width == max((rank + 1 for path in paths for rank in path), default=0)


@given(RANK_PATHS)
def test_slots_pick_each_nodes_guess_out_of_the_table(paths: list[list[int]]) -> None:
    template = TreeTemplate(paths=tuple(close(paths)))
    table = torch.tensor([[100 * head + rank for rank in range(template.width)] for head in range(template.depth)])
    picked = table.flatten()[template.slots()].tolist()
    assert picked == [100 * (len(path) - 1) + path[-1] for path in template.paths]


@given(RANK_PATHS)
def test_lists_survive_json(paths: list[list[int]]) -> None:
    template = TreeTemplate(paths=tuple(close(paths)))
    assert TreeTemplate.from_list(json.loads(json.dumps(template.to_list()))) == template


def test_the_likeliest_chain_stands_right_behind_the_root() -> None:
    template = TreeTemplate(paths=((1,), (0, 1), (0,), (0, 0), (0, 0, 0)))
    assert template.paths[:3] == ((0,), (0, 0), (0, 0, 0))


def test_a_set_that_is_not_closed_names_the_missing_prefix() -> None:
    with pytest.raises(ValueError, match=r"\(0, 2, 1\) is there, \(0, 2\) is missing"):
        TreeTemplate(paths=((0,), (0, 2, 1)))


@pytest.mark.parametrize(
    ("paths", "message"),
    [(((0,), (0,)), r"\(0,\) twice"), (((),), "non-empty"), (((0,), (0, -1)), "ranks >= 0"), (((-1,),), "ranks >= 0")],
)
def test_paths_that_cannot_be_are_refused(paths: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeTemplate(paths=paths)


def test_a_chain_template_is_every_heads_first_guess() -> None:
    assert chain_template(3).paths == ((0,), (0, 0), (0, 0, 0))
    assert chain_template(0).shape.size == 1


def test_slots_are_made_on_the_host_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        assert TreeTemplate(paths=((0,), (0, 0), (1,))).slots().tolist() == [0, 2, 1]
