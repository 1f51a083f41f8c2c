"""Tokenised conversations on disk."""

from pathlib import Path

import pytest
import torch

from medusa_spec.errors import DataError
from medusa_spec.files import write_json
from medusa_spec.finetune.tokens import TokenData, TokenWriter

CHATS = [([1, 2, 3], [False, True, True]), ([4, 5], [False, True]), ([6, 7, 8, 9], [True, False, True, True])]


def written(folder: Path, shard_tokens: int) -> TokenData:
    writer = TokenWriter(folder, "train", shard_tokens=shard_tokens)
    for ids, mask in CHATS:
        writer.add(ids, mask)
    writer.flush()
    write_json(folder / "manifest.json", {"splits": {"train": writer.counts()}})
    return TokenData(folder, "train")


@pytest.mark.parametrize("shard_tokens", [1, 4, 1000])
def test_what_is_written_is_read(tmp_path: Path, shard_tokens: int) -> None:
    data = written(tmp_path, shard_tokens)
    assert [(c.input_ids.tolist(), c.mask.tolist()) for c in data] == CHATS
    assert data.lengths() == [3, 2, 4]


def test_answer_tokens_are_counted(tmp_path: Path) -> None:
    data = written(tmp_path, 4)
    expected = torch.zeros(10, dtype=torch.int64)
    expected[[2, 3, 5, 6, 8, 9]] = 1
    assert torch.equal(data.answer_counts(10), expected)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="below 9 .* got 9"):
        written(tmp_path, 1000).answer_counts(9)


def test_a_shard_that_does_not_fit_the_manifest_is_refused(tmp_path: Path) -> None:
    written(tmp_path, 1000)
    write_json(tmp_path / "manifest.json", {"splits": {"train": {"shards": 1, "conversations": 5}}})
    with pytest.raises(DataError, match="5 train conversations .* got 3"):
        TokenData(tmp_path, "train")


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    written(tmp_path, 1000)
    path = tmp_path / "train-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="train-00000.* cannot be read"):
        TokenData(tmp_path, "train")
