"""A token map becomes a draft vocabulary in rising order, or is refused."""

from dataclasses import replace

import pytest
import torch

from medusa_spec.errors import CheckpointError
from medusa_spec.formats.contents import read_contents
from medusa_spec.formats.layout import Layout
from medusa_spec.formats.rows import Rows, read_rows

TOKEN_MAP = torch.tensor([70, 5, 127, 0, 33, 9])
LAYOUT = Layout(
    format="F", kind="medusa", num_heads=1, num_layers=1, names={}, own_lm_heads=True, token_map="token_map"
)
BAD_MAPS = {
    "twice": (torch.tensor([5, 5, 9, 0, 1, 2]), "name each id once, got 6 ids, of which 5 are different"),
    "past-the-end": (TOKEN_MAP + 1, r"ids in 0\.\.127, the target's vocabulary, got .* in 1\.\.128"),
    "negative": (TOKEN_MAP - 1, r"in -1\.\.126"),
    "no-ids": (TOKEN_MAP.double(), r"of torch\.float64"),
    "two-dimensional": (TOKEN_MAP.view(2, 3), r"shape \(2, 3\)"),
    "empty": (TOKEN_MAP[:0], r"shape \(0,\)"),
}


@pytest.mark.parametrize(("token_map", "named"), BAD_MAPS.values(), ids=list(BAD_MAPS))
def test_a_token_map_of_no_ids_is_refused(token_map, named, write, names):
    contents = read_contents(write({"token_map": token_map.clone()}))
    with pytest.raises(CheckpointError, match=f"token_map must .*{named}"):
        read_rows(contents, LAYOUT, 128)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_a_token_map_is_put_in_rising_order(dtype, write):
    rows = read_rows(read_contents(write({"token_map": TOKEN_MAP.to(dtype)})), LAYOUT, 128)
    assert rows.ids.dtype == torch.int64 and rows.ids.tolist() == [0, 5, 9, 33, 70, 127]
    assert torch.equal(TOKEN_MAP[rows.order], rows.ids)


def test_without_a_token_map_all_tokens_have_their_row(names):
    assert read_rows(names(), replace(LAYOUT, token_map=None), 128).ids is None


def test_rows_follow_the_ids_whether_they_are_cut_or_whole():
    ids, order = torch.tensor([9, 2, 5]).sort()
    rows = Rows(ids=ids, order=order, vocab_size=10)
    whole = torch.arange(10)
    assert rows.of(whole).tolist() == rows.of(whole[[9, 2, 5]]).tolist() == [2, 5, 9]
    assert rows.of(torch.arange(7)).tolist() == list(range(7))  # no shape that it knows
    assert torch.equal(Rows(ids=None, order=None, vocab_size=10).of(whole), whole)


OFFSETS = replace(LAYOUT, token_map=None, offsets=("d2t", "t2d"))
IDS = torch.tensor([0, 5, 9, 33, 70, 127])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("table", [torch.bool, torch.uint8], ids=str)
def test_offsets_lead_from_rows_to_ids(dtype, table, write):
    marks = torch.zeros(128, dtype=table)
    marks[IDS] = 1
    contents = read_contents(write({"d2t": (IDS - torch.arange(6)).to(dtype), "t2d": marks}))
    for layout in (OFFSETS, replace(OFFSETS, offsets=("d2t", None))):
        rows = read_rows(contents, layout, 128)
        assert rows.ids.dtype == torch.int64 and torch.equal(rows.ids, IDS)
        assert torch.equal(rows.of(torch.arange(6)), torch.arange(6))
        assert len(rows.of(torch.arange(128))) == 128  # whose shape is an error later


def test_offsets_of_nothing_are_no_draft_vocabulary(write):
    layout = replace(OFFSETS, offsets=("d2t", None))
    rows = read_rows(read_contents(write({"d2t": torch.zeros(128, dtype=torch.long)})), layout, 128)
    assert rows.ids is None and rows.order is None


@pytest.mark.parametrize("offsets", [torch.zeros(0, dtype=torch.long), torch.zeros(2, 3).long(), torch.zeros(6).bool()])
def test_offsets_of_no_rows_are_refused(offsets, write):
    with pytest.raises(CheckpointError, match="d2t must hold an int64 for each row of the LM head, got shape"):
        read_rows(read_contents(write({"d2t": offsets})), replace(OFFSETS, offsets=("d2t", None)), 128)
