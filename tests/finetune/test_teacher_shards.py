"""The target's likeliest tokens beside the states."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_spec.errors import CheckpointError
from medusa_spec.finetune.store import StateStore, shard_path
from medusa_spec.finetune.teacher_shards import read_teacher_shard, write_teacher_shard

MakeStore = Callable[..., StateStore]
MASKS = st.lists(st.lists(st.booleans(), min_size=2, max_size=12), min_size=1, max_size=5)
KEPT = 2


def with_teacher(
    make_store: MakeStore, folder: Path, masks: list[list[bool]], *, whole: bool, heads: int
) -> StateStore:
    """A store whose teacher names, at each row, its conversation and position in place of tokens."""
    store = make_store(folder, masks, whole=whole, num_heads=heads)
    for number, h in enumerate(store.h):
        ids = torch.stack([store.conversations[number], store.positions[number]], 1)
        logs = -torch.rand(len(h), KEPT) - 1
        write_teacher_shard(shard_path(folder / "teacher", "train", number), ids, logs)
    return StateStore(folder, "train", heads, teacher=True)


def naive(mask: list[bool], conversation: int, position: int, head: int) -> list[int] | None:
    """Where head's token was chosen: at position t + 1 + k, if the token after that is an answer."""
    place = position + 1 + head
    return [conversation, place] if place + 1 < len(mask) and mask[place + 1] else None


@settings(max_examples=60)
@given(MASKS, st.integers(1, 4), st.booleans(), st.randoms())
def test_a_head_learns_from_the_row_at_which_its_token_was_chosen(
    tmp_path_factory: pytest.TempPathFactory,
    make_store: MakeStore,
    masks: list[list[bool]],
    heads: int,
    whole: bool,
    dice: random.Random,
) -> None:
    store = with_teacher(make_store, tmp_path_factory.mktemp("store"), masks, whole=whole, heads=heads)
    places = list(zip(torch.cat(store.conversations).tolist(), torch.cat(store.positions).tolist(), strict=True))
    numbers = dice.sample(range(len(places)), len(places))
    batch = store.rows(torch.tensor(numbers, dtype=torch.int64)).batch()
    assert batch["targets"].shape == (len(places), heads + 1)
    for row, number in enumerate(numbers):
        conversation, position = places[number]
        for k in range(heads):
            expected = naive(masks[conversation], conversation, position, k)
            probs = batch["teacher_probs"][row, k]
            assert (batch["targets"][row, k + 1] >= 0) == (expected is not None)
            if expected is None:
                assert not probs.any()
            else:
                assert batch["teacher_ids"][row, k].tolist() == expected and (probs > 0).all()
    if whole:
        texts = store.texts()
        padded = store.batch(texts)
        for line, text in enumerate(texts):
            rows = torch.arange(text.length) + store.starts[text.shard] + text.start
            alone = store.rows(rows).teacher
            for name, column in alone.items():
                assert torch.equal(padded[name][line, : text.length], column)
                assert not padded[name][line, text.length :].any()


def test_probabilities_are_kept_to_a_few_thousandths(tmp_path: Path) -> None:
    probs = (4 * torch.randn(500, 64)).softmax(1).sort(1, descending=True).values[:, :16]
    write_teacher_shard(tmp_path / "shard.safetensors", torch.arange(16).expand(500, 16), probs.log())
    kept = read_teacher_shard(tmp_path / "shard.safetensors", 500)["log_probs"].float().exp()
    error = (kept / probs - 1).abs()
    assert error.max() < 4e-3 and error[probs > 0.5].max() < 3e-4


def test_a_store_without_a_teacher_gives_none(tmp_path: Path, make_store: MakeStore) -> None:
    store = make_store(tmp_path, [[True] * 6])
    assert store.teacher is None and set(store.rows(torch.arange(2)).batch()) == {"h", "targets"}
    with pytest.raises(CheckpointError, match="train-00000.*run the teacher stage again"):
        StateStore(tmp_path, "train", 3, teacher=True)


def test_a_shard_of_another_size_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    write_teacher_shard(path, torch.zeros(4, 2), torch.zeros(4, 2))
    with pytest.raises(CheckpointError, match="must hold 5 positions .* got 4"):
        read_teacher_shard(path, 5)
