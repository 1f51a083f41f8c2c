"""Parts of passes stay what they are when they are picked or joined."""

import torch

from medusa_spec.target_output import TargetOutput, joined


def numbered(rows: int, places: int, first: int = 0) -> TargetOutput:
    number = torch.arange(first, first + rows * places).reshape(rows, places, 1)
    return TargetOutput(logits=number, h=number * 10, layers=(number * 100)[:, :, None])


def test_positions_are_picked_by_row_and_place() -> None:
    out = numbered(2, 3).at([1, 0, 1], [0, 2, 2])
    assert out.logits[0, :, 0].tolist() == [3, 2, 5]
    assert out.h[0, :, 0].tolist() == [30, 20, 50]
    assert out.layers is not None and out.layers.shape == (1, 3, 1, 1)
    assert out.last().logits.tolist() == [[[5]]]


def test_passes_are_joined_along_positions_or_rows() -> None:
    parts = [numbered(2, 3), numbered(2, 3, first=6)]
    assert joined(parts).h.shape == (2, 6, 1) and joined(parts, dim=0).h.shape == (4, 3, 1)
    assert joined(parts).logits[1, :, 0].tolist() == [3, 4, 5, 9, 10, 11]
    assert joined(parts[:1]) is parts[0]
    assert joined(parts).part(slice(2, 4)).h[0, :, 0].tolist() == [20, 60]


def test_states_that_were_not_asked_for_stay_away() -> None:
    bare = TargetOutput(logits=torch.zeros(1, 2, 3), h=torch.zeros(1, 2, 4))
    assert joined([bare, bare]).layers is None and bare.at([0], [1]).layers is None and bare.last().layers is None
