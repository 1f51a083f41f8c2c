"""The hidden-state store."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from medusa_spec.errors import CheckpointError
from medusa_spec.files import read_json, write_json
from medusa_spec.finetune.store import StateStore, kept_positions, make_targets, shard_path
from medusa_spec.finetune.tokens import Conversation, TokenData

MakeStore = Callable[..., StateStore]
MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=7)


def naive_targets(conversation: Conversation, position: int, num_heads: int) -> list[int]:
    ids, mask = conversation.input_ids.tolist(), conversation.mask.tolist()
    places = range(position + 1, position + 2 + num_heads)
    return [ids[place] if place < len(ids) and mask[place] else -100 for place in places]


def naive_tokens(conversation: Conversation, position: int, num_heads: int) -> list[int]:
    ids = conversation.input_ids.tolist()
    return [ids[place] if place < len(ids) else 0 for place in range(position + 1, position + 1 + num_heads)]


def places_of(store: StateStore) -> list[tuple[int, int]]:
    """Conversation and position of every row."""
    pairs = zip(torch.cat(store.conversations).tolist(), torch.cat(store.positions).tolist(), strict=True)
    return list(pairs)


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 5))
def test_targets_equal_a_naive_loop(mask: list[bool], num_heads: int) -> None:
    ids = list(range(100, 100 + len(mask)))
    targets = make_targets(torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.bool), num_heads)
    assert targets.dtype == torch.int32 and targets.shape == (len(ids), num_heads + 1)
    for t in range(len(ids)):
        for j in range(num_heads + 1):
            place = t + 1 + j
            expected = ids[place] if place < len(ids) and mask[place] else -100
            assert targets[t, j] == expected


@given(st.lists(st.booleans(), max_size=12))
def test_a_store_keeps_what_decoding_drafts_from_or_all(mask: list[bool]) -> None:
    given = torch.tensor(mask, dtype=torch.bool)
    chosen = [t for t in range(len(mask) - 1) if mask[t + 1]]
    assert kept_positions(given, whole=True).tolist() == list(range(chosen[-1] + 1 if chosen else 0))
    assert kept_positions(given, whole=False).tolist() == chosen


@settings(max_examples=40)
@given(MASKS, st.integers(1, 4), st.booleans(), st.lists(st.integers(0, 10**6), max_size=12))
def test_any_rows_come_back_bit_equal_with_the_targets_of_their_texts(
    tmp_path_factory: pytest.TempPathFactory,
    make_store: MakeStore,
    masks: list[list[bool]],
    num_heads: int,
    whole: bool,
    draws: list[int],
) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = make_store(folder, masks, whole=whole, num_heads=num_heads)
    h, places, data = torch.cat(store.h), places_of(store), TokenData(folder / "data", "train")
    assert (
        len(store)
        == len(places)
        == sum(len(kept_positions(torch.tensor(mask, dtype=torch.bool), whole=whole)) for mask in masks)
    )
    numbers = [draw % len(places) for draw in draws] if places else []
    rows = store.rows(torch.tensor(numbers, dtype=torch.int64))
    assert rows.h.dtype == torch.bfloat16 and rows.targets.dtype == torch.int32
    assert torch.equal(rows.h, h[numbers])
    assert rows.targets.tolist() == [naive_targets(data[places[n][0]], places[n][1], num_heads) for n in numbers]


@settings(max_examples=40)
@given(MASKS, st.integers(1, 4), st.booleans())
def test_decoding_would_draft_where_the_target_chose_the_next_token(
    tmp_path_factory: pytest.TempPathFactory,
    make_store: MakeStore,
    masks: list[list[bool]],
    num_heads: int,
    whole: bool,
) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = make_store(folder, masks, whole=whole, num_heads=num_heads)
    data = TokenData(folder / "data", "train")
    wanted = [row for row, (c, t) in enumerate(places_of(store)) if naive_targets(data[c], t, 1)[0] != -100]
    assert store.decoding_rows().tolist() == wanted


@settings(max_examples=40)
@given(MASKS, st.integers(1, 4), st.sampled_from([(), (0,), (1, 3)]), st.randoms())
def test_texts_side_by_side_are_the_texts_and_padding_counts_for_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    make_store: MakeStore,
    masks: list[list[bool]],
    num_heads: int,
    taps: tuple[int, ...],
    dice: random.Random,
) -> None:
    folder = tmp_path_factory.mktemp("store")
    assume(any(any(mask[1:]) for mask in masks))
    store = make_store(folder, masks, taps=taps, num_heads=num_heads)
    data, texts = TokenData(folder / "data", "train"), store.texts()
    assert sum(text.length for text in texts) == len(store)
    dice.shuffle(texts)
    batch = store.batch(texts)
    lengths = [len(kept_positions(torch.tensor(mask), whole=True)) for mask in masks]
    width = max(lengths)
    assert set(batch) == {"h", "targets", "tokens"} | ({"layers"} if taps else set())
    assert batch["tokens"].dtype == torch.int64 and batch["targets"].dtype == torch.int32
    seen = []
    for row, text in enumerate(texts):
        number = int(store.conversations[text.shard][text.start])
        seen.append(number)
        conversation, rows = data[number], slice(text.start, text.start + text.length)
        assert text.length == lengths[number]
        assert torch.equal(batch["h"][row, : text.length], store.h[text.shard][rows])
        if taps:
            assert torch.equal(batch["layers"][row, : text.length], store.layers[text.shard][rows])
        for t in range(width):
            inside = t < text.length
            targets = naive_targets(conversation, t, num_heads) if inside else [-100] * (num_heads + 1)
            assert batch["targets"][row, t].tolist() == targets
            tokens = naive_tokens(conversation, t, num_heads) if inside else [0] * num_heads
            assert batch["tokens"][row, t].tolist() == tokens
        assert not batch["h"][row, text.length :].any()
    assert sorted(seen) == [number for number, length in enumerate(lengths) if length]


def test_a_shard_of_another_size_is_refused(tmp_path: Path, make_store: MakeStore) -> None:
    make_store(tmp_path, [[True] * 4, [True] * 4], per_shard=1)
    path = tmp_path / "states" / "manifest.json"
    write_json(path, read_json(path) | {"splits": {"train": [3, 4]}})
    with pytest.raises(CheckpointError, match="must hold 4 positions .* got 3"):
        StateStore(tmp_path, "train", 3)


def test_a_damaged_shard_is_named(tmp_path: Path, make_store: MakeStore) -> None:
    make_store(tmp_path, [[True] * 4])
    path = shard_path(tmp_path / "states", "train", 0)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="train-00000.*states stage"):
        StateStore(tmp_path, "train", 3)


def test_a_shard_without_a_column_is_named(tmp_path: Path, make_store: MakeStore) -> None:
    make_store(tmp_path, [[True] * 4])
    path = shard_path(tmp_path / "states", "train", 0)
    columns = load_file(path)
    save_file({name: columns[name] for name in ("h", "position")}, path)
    with pytest.raises(CheckpointError, match="train-00000.*conversation.*states stage"):
        StateStore(tmp_path, "train", 3)
