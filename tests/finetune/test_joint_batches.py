"""Texts for joint training are those that a store of whole texts gives, with ids instead of states."""

from collections.abc import Callable
from pathlib import Path

import torch

from medusa_spec.finetune.batches import TextBatches
from medusa_spec.finetune.joint_batches import TokenTexts
from medusa_spec.finetune.store import StateStore

MASKS = [[False, True, True, False, True], [False, False, True], [False] + [True] * 7, [True, False, True, True]]


def test_a_batch_says_what_that_of_a_store_says(make_store: Callable[..., StateStore], tmp_path: Path) -> None:
    store = make_store(tmp_path, MASKS, num_heads=2)
    texts = TokenTexts(tmp_path, "train", 2)
    assert [text.length for text in texts.texts()] == [len(mask) for mask in MASKS]
    by_number = {}
    for text in store.texts():
        number = int(store.conversations[text.shard][text.start])
        by_number[number] = store.batch([text])
    for number, text in enumerate(texts.texts()):
        batch = texts.batch([text])
        assert batch["input_ids"].shape == (1, len(MASKS[number]))
        stored = by_number[number]
        kept = stored["targets"].shape[1]  # the store ends where nothing is left to learn
        assert torch.equal(batch["targets"][:, :kept], stored["targets"])
        assert torch.equal(batch["tokens"][:, :kept], stored["tokens"])
        assert (batch["targets"][:, kept:] == -100).all()


def test_shorter_texts_are_filled_up_by_what_counts_for_nothing(
    make_store: Callable[..., StateStore], tmp_path: Path
) -> None:
    make_store(tmp_path, MASKS, num_heads=2)
    texts = TokenTexts(tmp_path, "train", 2)
    batch = texts.batch(texts.texts())
    assert batch["input_ids"].shape == (4, 8) and batch["targets"].shape == (4, 8, 3)
    for row, mask in enumerate(MASKS):
        assert (batch["targets"][row, len(mask) :] == -100).all()


def test_every_text_is_read_once_an_epoch(make_store: Callable[..., StateStore], tmp_path: Path) -> None:
    make_store(tmp_path, MASKS, num_heads=2)
    texts = TokenTexts(tmp_path, "train", 2)
    batches = TextBatches(texts, batch_positions=16, epochs=1, seed=3)
    read = sum(int((batches[step]["input_ids"] != 0).sum()) for step in range(len(batches)))
    assert read == sum(len(mask) for mask in MASKS)


def test_rows_are_known_by_their_place_and_by_what_there_is_to_learn(
    make_store: Callable[..., StateStore], tmp_path: Path
) -> None:
    make_store(tmp_path, MASKS, num_heads=2)
    texts = TokenTexts(tmp_path, "train", 2)
    batches = TextBatches(texts, batch_positions=16, epochs=1, seed=3)
    numbers = torch.tensor([2, 0])
    rows = batches.rows(numbers)
    conversations, positions = texts.where(rows)
    assert conversations.tolist() == [2] * 8 + [0] * 5
    assert positions.tolist() == [*range(8), *range(5)]
    batch = batches.read(numbers)
    assert torch.equal(batches.answers(numbers)["targets"], torch.cat([batch["targets"][0], batch["targets"][1, :5]]))
