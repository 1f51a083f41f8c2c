"""The hidden-state store."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.errors import CheckpointError
from medusa_spec.files import write_json
from medusa_spec.finetune.store import StateStore, make_targets, shard_path, wanted_positions, write_shard


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
    wanted = [t for t in range(len(ids)) if any(mask[t + 2 : t + 2 + num_heads])]
    assert wanted_positions(targets).tolist() == wanted


def make_store(folder: Path, sizes: list[int]) -> tuple[StateStore, torch.Tensor, torch.Tensor]:
    total = sum(sizes)
    h, targets = torch.randn(total, 8).bfloat16(), torch.randint(0, 50, (total, 4), dtype=torch.int32)
    numbers = torch.arange(total, dtype=torch.int32)
    start = 0
    for number, size in enumerate(sizes):
        part = slice(start, start + size)
        write_shard(shard_path(folder, "train", number), h[part], targets[part], numbers[part], numbers[part].clone())
        start += size
    write_json(folder / "manifest.json", {"hidden_size": 8, "num_heads": 3, "splits": {"train": sizes}})
    return StateStore(folder, "train"), h, targets


@given(st.lists(st.integers(0, 18), max_size=20))
def test_any_rows_come_back_bit_equal(tmp_path_factory: pytest.TempPathFactory, numbers: list[int]) -> None:
    store, h, targets = make_store(tmp_path_factory.mktemp("store"), [7, 1, 11])
    assert len(store) == 19
    rows = store.rows(torch.tensor(numbers, dtype=torch.int64))
    assert rows.h.dtype == torch.bfloat16
    assert torch.equal(rows.h, h[numbers]) and torch.equal(rows.targets, targets[numbers])


def test_a_shard_of_another_size_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path, [4, 4])
    write_json(tmp_path / "manifest.json", {"hidden_size": 8, "num_heads": 3, "splits": {"train": [4, 5]}})
    with pytest.raises(CheckpointError, match="must hold 5 positions .* got 4"):
        StateStore(tmp_path, "train")


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    make_store(tmp_path, [4])
    path = shard_path(tmp_path, "train", 0)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="train-00000.*states stage"):
        StateStore(tmp_path, "train")
