"""Places are in order, found by the longest end of a context, and a file that is not whole is no segment."""

import os
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.drafters.suffix_segment import LEAST_MATCH, Segment, suffix_order, write_segment
from medusa_spec.drafters.text_index import BETWEEN, LONGEST_MATCH
from medusa_spec.errors import CheckpointError
from medusa_spec.files import write_tensors

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=80), max_size=4)


def joined(texts: list[list[int]]) -> list[int]:
    return [token for text in texts for token in (*text, BETWEEN)]


def backwards(ids: list[int], place: int) -> list[int]:
    return ids[max(0, place - LONGEST_MATCH) : place][::-1]


def segment_of(folder: Path, texts: list[list[int]]) -> Segment:
    path = folder / "texts.safetensors"
    write_segment(path, torch.tensor(joined(texts), dtype=torch.int32), {"identity": "x"})
    return Segment(path)


@given(TEXTS)
def test_places_with_enough_before_and_one_behind_are_in_the_order_of_what_stands_before(
    texts: list[list[int]],
) -> None:
    ids = joined(texts)
    expected = [place for place in range(LEAST_MATCH, len(ids)) if BETWEEN not in ids[place - LEAST_MATCH : place + 1]]
    assert suffix_order(torch.tensor(ids, dtype=torch.int32)).tolist() == sorted(
        expected, key=lambda place: backwards(ids, place)
    )


@given(TEXTS, st.lists(st.integers(0, 2), min_size=1, max_size=LONGEST_MATCH))
def test_the_longest_end_is_found_wherever_it_stood(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], wanted: list[int]
) -> None:
    segment = segment_of(tmp_path_factory.mktemp("segment"), texts)
    ids = joined(texts)
    places = [place for place in range(len(ids)) if BETWEEN not in ids[max(0, place - LEAST_MATCH) : place + 1]]
    places = [place for place in places if place >= LEAST_MATCH]
    lengths = {place: len(os.path.commonprefix([backwards(ids, place), wanted])) for place in places}
    longest = max(lengths.values(), default=0)
    assert segment.longest(wanted) == longest
    found = sorted(segment.place(number) for number in segment.span(wanted[:longest]))
    assert found == [place for place in places if lengths[place] == longest]
    for place in found:
        rest = ids[place:]
        assert list(segment.following(place, 5)) == rest[: rest.index(BETWEEN)][:5]


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    segment = segment_of(tmp_path, [[5, 6, 7, 8, 9], [1, 2]])
    assert segment.ids.tolist() == [5, 6, 7, 8, 9, BETWEEN, 1, 2, BETWEEN]
    assert len(segment) == 9 and segment.notes["identity"] == "x"
    assert [segment.place(number) for number in segment.span([8, 7])] == [4]


def test_what_is_not_whole_is_named(tmp_path: Path) -> None:
    path = segment_of(tmp_path, [list(range(300))]).path
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-100] ^= 1
    for wrong in (whole[:-1], whole[: len(whole) // 2], whole[:5], b"", bytes(flipped), b"\xff" * 500):
        path.unlink()
        path.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=f"{re.escape(str(path))} is damaged .*delete it"):
            Segment(path)
    write_tensors(path, {"ids": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="its format must be 'suffix-segment 1', got None"):
        Segment(path)
    with pytest.raises(FileNotFoundError):
        Segment(tmp_path / "none")


def test_being_checked_does_not_keep_a_file_in_memory(tmp_path: Path) -> None:
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        pytest.skip("the system does not say what is resident")
    path = tmp_path / "texts.safetensors"
    write_segment(path, torch.arange(1 << 20, dtype=torch.int32), {})
    segment = Segment(path)
    resident = [int(size) for size in re.findall(rf"{path}\n(?:.*\n)*?Rss: +(\d+) kB", maps.read_text())]
    assert resident and sum(resident) < 1024
    assert segment.longest([9, 8, 7, 6, 5]) == 5
