"""Layers of one shape in one tensor, with a length for each row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.slab import ALIGNMENT, Slab, aligned, stacked

LAYERS, HEADS, DIM = 2, 1, 1


class Layer:
    """What a slab hands its parts to."""

    keys: torch.Tensor
    values: torch.Tensor


def slab(window: int | None, rows: int, capacity: int) -> Slab:
    """Slot s of every layer and row holds the number s."""
    states = torch.arange(capacity).float().expand(LAYERS, rows, HEADS, capacity)[..., None].clone()
    made = Slab(layers=[Layer(), Layer()], window=window, keys=states, values=-states, bases=[0] * rows)
    made.hand_out()
    return made


@given(st.integers(1, 5000))
def test_capacities_hold_what_they_must_and_little_more(slots: int) -> None:
    assert slots <= aligned(slots) < slots + ALIGNMENT and aligned(slots) % ALIGNMENT == 0


def test_layers_are_stacked_with_room_behind_them() -> None:
    states = [torch.full((1, HEADS, 3, DIM), float(layer)) for layer in range(LAYERS)]
    whole = stacked(states, 8)
    assert whole.shape == (LAYERS, 1, HEADS, 8, DIM)
    assert whole[:, 0, 0, :, 0].tolist() == [[0.0] * 8, [1.0] * 3 + [0.0] * 5]


@pytest.mark.parametrize("window", [None, 6])
def test_room_for_other_numbers_of_nodes_in_each_row_leaves_what_is_held(window: int | None) -> None:
    made, lengths = slab(window, rows=3, capacity=20), [18, 4, 11]
    made.make_room(lengths, [9, 0, 2])
    assert all(used + nodes <= made.capacity for used, nodes in zip(made.used(lengths), [9, 0, 2], strict=True))
    for row, length in enumerate(lengths):
        base = made.bases[row]
        assert base <= (0 if window is None else max(0, length - window + 1))
        assert made.layers[1].keys[row, 0, : length - base, 0].tolist() == list(range(base, length))
        assert made.layers[1].values[row, 0, : length - base, 0].tolist() == [-slot for slot in range(base, length)]


def test_there_is_room_already_where_a_row_without_nodes_is_full() -> None:
    made = slab(None, rows=2, capacity=20)
    before = made.keys
    made.make_room([20, 5], [0, 8])
    assert made.keys is before


def test_slots_of_all_layers_move_at_once_and_of_one_row_alone() -> None:
    made = slab(None, rows=2, capacity=8)
    made.move(1, torch.tensor([5, 7]), 2)
    assert [layer.keys[1, 0, :, 0].tolist() for layer in made.layers] == [[0, 1, 5, 7, 4, 5, 6, 7]] * LAYERS
    assert made.layers[0].keys[0, 0, :, 0].tolist() == list(range(8))
