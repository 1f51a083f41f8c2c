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
