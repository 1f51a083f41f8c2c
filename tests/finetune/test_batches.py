"""The order of the training batches."""

from pathlib import Path

import pytest
import torch

from medusa_spec.finetune import batches
from medusa_spec.finetune.batches import StepBatches
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.ranks import decoding_rows
from medusa_spec.finetune.store import StateStore


def make(config: FinetuneConfig, seed: int = 0) -> StepBatches:
    store = StateStore(Path(config.output) / "states", "train")
    return StepBatches(store, batch_positions=300, epochs=3, seed=seed)


@pytest.mark.parametrize("window", [1, 2, 32])
def test_every_epoch_reads_every_drafting_row_once(
    finished: FinetuneConfig, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(batches, "WINDOW_SHARDS", window)
    data = make(finished)
    wanted = decoding_rows(data.store).tolist()
    orders = [data.order(epoch).tolist() for epoch in range(3)]
    assert all(sorted(order) == wanted for order in orders)
    assert orders[0] != orders[1] != wanted


def test_a_step_is_a_function_of_seed_and_number(finished: FinetuneConfig) -> None:
    one, two = make(finished), make(finished)
    assert len(one) == 3 * one.steps_per_epoch
    list(map(one.__getitem__, range(len(one))))
    for step in (0, one.steps_per_epoch, len(one) - 1):
        assert all(torch.equal(one[step][key], two[step][key]) for key in ("h", "targets"))
    assert not torch.equal(make(finished, seed=1)[0]["targets"], one[0]["targets"])


def test_batches_hold_the_rows_of_the_order(finished: FinetuneConfig) -> None:
    data = make(finished)
    read = torch.cat([data[step]["targets"] for step in range(data.steps_per_epoch)])
    assert torch.equal(read, data.store.rows(data.order(0)).targets)
