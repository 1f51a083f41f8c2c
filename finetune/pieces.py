"""A step's batch in pieces: for gradient accumulation, and for several processes. Knows no model, only how to count."""

from collections.abc import Callable

import torch
from torch.utils.data import Dataset

from medusa_spec.finetune.batches import Batch, StepBatches
from medusa_spec.finetune.processes import Processes
from medusa_spec.finetune.store import UNTRAINED

Count = Callable[..., torch.Tensor]
"""Targets [T, K + 1], and what else there is to learn from, to what the means of losses are divided by."""

LEARNT = ("targets", "teacher_ids", "teacher_probs")
"""Columns that are counted."""


class Pieces(Dataset[Batch]):
    """The pieces of every step's batch that one process trains on, step after step.

    The loss of a step is a mean over all positions of its batch, whoever computes it: a piece therefore says how many
    positions it holds and how many the whole batch does (`counts` [2, ...]), for every mean. These come from the token
    data (and the teacher's likeliest tokens), so no process asks another.

    ```
    2 processes, accumulation 2:   step 0 = [p0 p1 p2 p3]     process 0: p0, p2     process 1: p1, p3
    ```

    Args:
        batches: Of the whole run.
        count: Counts what each mean is taken over.
        steps: Of them, from the first on; None for all. Trainer, which takes up a run after its last step, would
            otherwise find that there is more, and go one step further.
        accumulation: Pieces per step and process.
        processes: All of them, and which one this is.
    """

    def __init__(
        self,
        batches: StepBatches,
        count: Count,
        *,
        steps: int | None = None,
        accumulation: int,
        processes: Processes,
    ) -> None:
        self.batches, self.count, self.accumulation, self.processes = batches, count, accumulation, processes
        self.steps = len(batches) if steps is None else steps

    @property
    def per_step(self) -> int:
        """Pieces of a step, over all processes."""
        return self.accumulation * self.processes.count

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def __getitem__(self, item: int) -> Batch:
        step, place = divmod(item, self.accumulation)
        if self.per_step == 1:
            return self.batches[step]
        whole = self.batches.numbers(step)
        part = self.part(step, place)
        batch = self.batches.read(part if len(part) else whole[:1])
        if not len(part):  # fewer texts than pieces: something must be computed, but counts for nothing
            batch["targets"] = torch.full_like(batch["targets"], UNTRAINED)
        counts = [self.count(**answers(batch)), self.count(**self.batches.answers(whole))]
        return {**batch, "counts": torch.stack(counts)}

    def part(self, step: int, place: int) -> torch.Tensor:
        """What this process's piece number `place` of a step reads, as `StepBatches.numbers` does."""
        piece = place * self.processes.count + self.processes.index
        return self.batches.numbers(step).tensor_split(self.per_step)[piece]


def answers(batch: Batch) -> Batch:
    """What there is to learn in a batch, position by position, without states; see `StateStore.answers`."""
    places = batch["targets"].dim() - 1
    return {name: batch[name].flatten(0, places - 1) for name in LEARNT if name in batch}
