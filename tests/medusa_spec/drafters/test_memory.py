"""Keys stay where they were put, whatever a draft adds behind them, and masks are what the drawings say."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.drafters import memory as module
from medusa_spec.drafters.memory import TextMemory, TextView, draft_mask, text_mask
from medusa_spec.heads import attention

CPU = torch.device("cpu")


def rows(count, heads=2, dim=4):
    return torch.randn(1, heads, count, dim)


@pytest.mark.parametrize("room", [0, 64])
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["text", "draft", "drop"])), max_size=12))
def test_a_memory_holds_the_text_and_behind_it_the_draft(room, steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROOM", room)
        memory, text, draft = TextMemory(), rows(0), rows(0)
        for count, kind in steps:
            key, value = rows(count), rows(count)
            if kind == "drop" or (kind == "text" and draft.shape[2]):  # the text goes on once the draft is gone
                memory.drop_draft()
                draft = rows(0)
            keys, values = memory.add(key, value)
            draft = torch.cat([draft, key], dim=2)
            if kind == "text":
                memory.keep_all()
                text, draft = torch.cat([text, draft], dim=2), rows(0)
            whole = torch.cat([text, draft], dim=2)
            assert torch.equal(keys, whole) and values.shape == whole.shape
            assert torch.equal(values[:, :, values.shape[2] - count :], value)
            assert (memory.length, memory.end) == (text.shape[2], whole.shape[2])


def test_growing_copies_what_there_is_and_seldom_happens():
    memory, places = TextMemory(), set()
    for _ in range(1000):
        memory.add(rows(1), rows(1))
        places.add(memory.keys.data_ptr())
    assert len(places) < 8 and memory.keys.shape[2] < 2500


def test_a_dropped_draft_leaves_the_text():
    memory = TextMemory()
    keys, _ = memory.add(rows(3), rows(3))
    first = keys[:, :, :3].clone()
    memory.keep_all()
    memory.add(rows(2), rows(2))
    memory.drop_draft()
    assert (memory.length, memory.end) == (3, 3)
    keys, _ = memory.add(rows(2), rows(2))
    assert torch.equal(keys[:, :, :3], first) and keys.shape[2] == 5


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 4))
def test_rows_of_a_text_see_those_a_gap_before_them_and_themselves(start, count, gap):
    mask = text_mask(start, count, gap, CPU)
    assert mask.shape == (count, start + count)
    for row in range(count):
        own = start + row
        assert set(mask[row].nonzero().flatten().tolist()) == {s for s in range(own + 1) if s <= own - gap} | {own}


@st.composite
def drafts(draw):
    length, behind = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    slots = range(length, length + behind)
    seen = st.lists(st.sampled_from(slots), unique=True) if behind else st.just([])
    return length, length + behind, draw(st.lists(seen, min_size=1, max_size=4))


@given(drafts())
def test_rows_of_a_draft_see_the_text_what_they_are_said_to_and_themselves(draft):
    length, end, seen = draft
    mask = draft_mask(length, end, seen, CPU)
    assert mask.shape == (len(seen), end + len(seen))
    for row, slots in enumerate(seen):
        assert set(mask[row].nonzero().flatten().tolist()) == {*range(length), *slots, end + row}


def test_a_view_attends_to_all_that_the_memory_holds_under_its_mask():
    memory = TextMemory()
    old = memory.add(rows(3), rows(3))
    memory.keep_all()
    old = [part.clone() for part in old]
    mask = draft_mask(3, 3, [(), ()], CPU)
    query, key, value = rows(2, heads=4), rows(2), rows(2)
    view = TextView(memory, [7, 7], mask)
    assert view.positions.tolist() == [[7, 7]]
    whole = [torch.cat(parts, dim=2) for parts in zip(old, (key, value), strict=True)]
    torch.testing.assert_close(view.attend(query, key, value), attention(query, *whole, mask))
    keys, values = TextView(memory, [8], mask).update(key, value, 0)
    assert torch.equal(keys, torch.cat([whole[0], key], dim=2)) and torch.equal(values[:, :, 5:], value)


def test_a_slot_takes_the_bytes_of_its_keys_and_values():
    memory = TextMemory()
    assert memory.bytes_per_token == 0
    memory.add(rows(3), rows(3))
    assert memory.bytes_per_token == 2 * 2 * 4 * rows(1).element_size()
