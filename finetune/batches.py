"""The order in which training reads the store: a fixed list of batches, one per step of the whole run."""

import torch
from torch.utils.data import Dataset

from medusa_spec.finetune.ranks import decoding_rows
from medusa_spec.finetune.store import StateStore

WINDOW_SHARDS = 32
"""Shards shuffled together: reads stay near each other on disk when the store is larger than the memory."""


class StepBatches(Dataset[dict[str, torch.Tensor]]):
    """Item i is the batch of step i, over all epochs.

    So a resumed run needs no state of a shuffling generator: it goes on with item i.

    Args:
        store: The train split.
        batch_positions: Positions per step; the last batch of an epoch may be smaller.
        epochs: Passes over the store.
        seed: Of the order.
    """

    def __init__(self, store: StateStore, *, batch_positions: int, epochs: int, seed: int) -> None:
        self.store, self.batch_positions, self.seed = store, batch_positions, seed
        rows = decoding_rows(store)
        edges = torch.searchsorted(rows, store.starts)
        self.by_shard = [rows[a:b] for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
        self.steps_per_epoch = -(-len(rows) // batch_positions)
        self.epochs = epochs
        self._cached: tuple[int, torch.Tensor] | None = None

    def __len__(self) -> int:
        return self.steps_per_epoch * self.epochs

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        epoch, place = divmod(step, self.steps_per_epoch)
        start = place * self.batch_positions
        rows = self.store.rows(self.order(epoch)[start : start + self.batch_positions])
        return {"h": rows.h, "targets": rows.targets}

    def order(self, epoch: int) -> torch.Tensor:
        """Int64 row numbers in the order of this epoch, a function of seed and epoch alone."""
        if self._cached is None or self._cached[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            shards = torch.randperm(len(self.by_shard), generator=generator).tolist()
            windows = []
            for start in range(0, len(shards), WINDOW_SHARDS):
                window = torch.cat([self.by_shard[s] for s in shards[start : start + WINDOW_SHARDS]])
                windows.append(window[torch.randperm(len(window), generator=generator)])
            self._cached = epoch, torch.cat(windows)
        return self._cached[1]
