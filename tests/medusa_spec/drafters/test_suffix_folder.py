"""Segments stay few, what was merged stands once, and what is damaged is named and left alone."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_spec.drafters.suffix_folder import MOST_SEGMENTS, PARTS, SegmentFolder
from medusa_spec.drafters.suffix_segment import write_segment


def ids_of(first: int, count: int) -> torch.Tensor:
    return torch.tensor([*range(first, first + count - 1), -1], dtype=torch.int32)


def add(folder: SegmentFolder, ids: torch.Tensor, limit: int = 1 << 20) -> None:
    with folder.writing():
        folder.add(ids, {})
        folder.tidy(limit, {})


def held(folder: SegmentFolder) -> list[int]:
    return [token for segment in folder.segments for token in segment.ids.tolist()]


@given(st.lists(st.integers(1, 250), min_size=1, max_size=40))
@settings(max_examples=20)
def test_segments_stay_few_and_hold_the_newest_in_their_order(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int]
) -> None:
    folder, limit, first = SegmentFolder(tmp_path_factory.mktemp("corpus")), 1000, 0
    for count in counts:
        add(folder, ids_of(first, count), limit)
        first += count
        assert len(folder.segments) <= MOST_SEGMENTS
        assert all(len(segment) <= limit // PARTS for segment in folder.segments)
    every = [token for number, count in enumerate(counts) for token in ids_of(sum(counts[:number]), count).tolist()]
    kept = held(folder)
    assert kept == every[-len(kept) :]
    assert len(kept) == len(every) if len(every) <= limit else limit - limit // PARTS <= len(kept) <= limit
    assert len(list(folder.path.iterdir())) == len(folder.segments)


def test_others_see_what_was_added_and_merged(tmp_path: Path) -> None:
    writer, reader = SegmentFolder(tmp_path / "new"), SegmentFolder(tmp_path / "new")
    reader.refresh()
    assert reader.segments == ()
    for number in range(3 * MOST_SEGMENTS):
        add(writer, ids_of(10 * number, 10))
        reader.refresh()
        assert held(reader) == held(writer) and len(held(reader)) == 10 * (number + 1)


def test_nothing_is_opened_where_nothing_changed(tmp_path: Path) -> None:
    folder = SegmentFolder(tmp_path)
    add(folder, ids_of(0, 10))
    before = folder.segments
    folder.refresh()
    assert folder.segments is before
    add(folder, ids_of(10, 10))
    assert folder.segments[0] is before[0]


def test_what_a_kill_left_beside_what_it_was_merged_into_does_not_count(tmp_path: Path) -> None:
    folder = SegmentFolder(tmp_path)
    for number in range(3):
        add(folder, ids_of(10 * number, 10))
    merged = torch.cat([segment.ids for segment in folder.segments[:2]])
    write_segment(tmp_path / "0000000000-0000000001.safetensors", merged, {})
    reader = SegmentFolder(tmp_path)
    reader.refresh()
    assert held(reader) == held(folder) and len(reader.segments) == 2
    add(folder, ids_of(30, 10))
    assert sorted(file.name[:21] for file in tmp_path.iterdir()) == [
        "0000000000-0000000001",
        "0000000002-0000000002",
        "0000000003-0000000003",
    ]


@pytest.mark.filterwarnings("ignore:.*left out")
def test_what_is_damaged_is_neither_removed_nor_merged_over(tmp_path: Path) -> None:
    folder = SegmentFolder(tmp_path)
    for number in range(3):
        add(folder, ids_of(10 * number, 10))
    damaged = folder.segments[1].path
    damaged.unlink()
    damaged.write_bytes(b"half")
    folder = SegmentFolder(tmp_path)
    for number in range(3, 20):
        add(folder, ids_of(10 * number, 10))
    assert damaged.read_bytes() == b"half" and len(held(folder)) == 190
    assert len(folder.segments) <= MOST_SEGMENTS


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    folder = SegmentFolder(tmp_path)
    add(folder, ids_of(0, 10))
    assert len(folder.segments) == 1 and (tmp_path / "notes.txt").read_text() == "mine"
