"""What stops a training, with its cause: numbers that are none, and heads that cannot learn. Knows no trainer."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from medusa_spec.errors import MedusaError
from medusa_spec.finetune.batches import Batch, StepBatches
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.trained import TrainedHeads

SHOWN = 8
"""Conversations that an error lists."""
CHUNK = 1 << 18
"""Rows whose targets are counted at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """Where a training stands.

    Attributes:
        step: Number of the step, from 0.
        batches: All of the run.
        numbers: What is being trained on.
        learning_rate: Of this step.
    """

    step: int
    batches: StepBatches
    numbers: torch.Tensor
    learning_rate: float

    def words(self) -> str:
        """The batch in words."""
        rows = self.batches.rows(self.numbers)
        conversations = self.batches.store.where(rows)[0].unique().tolist()
        more = f" and {len(conversations) - SHOWN} more" if len(conversations) > SHOWN else ""
        shown = ", ".join(map(str, conversations[:SHOWN]))
        return f"the batch: {len(rows)} rows of train conversations {shown}{more}, counted from 0 as data/ holds them"


def stop_for_loss(losses: torch.Tensor, batch: Batch, model: nn.Module, place: Place) -> MedusaError:
    """The error for a loss that is not a number, or too large to be one.

    Args:
        losses: [K], one of them not finite.
        batch: What was read.
        model: The heads.
        place: Where it happened.
    """
    head = int((~losses.isfinite()).nonzero()[0])
    what = f"the loss of head {head} is {float(losses[head])} at step {place.step}"
    return MedusaError(f"{what}: {_cause(batch, model, place)}; {place.words()}")


def stop_for_gradient(norms: dict[int, float], batch: Batch, model: nn.Module, place: Place) -> MedusaError:
    """The error for gradients that are not numbers: the step would make weights of them."""
    number = next(number for number, norm in norms.items() if not math.isfinite(norm))
    what = f"the gradient of head {number} is {norms[number]} at step {place.step}, although its loss is a number"
    return MedusaError(f"{what}: {_cause(batch, model, place)}; {place.words()}")


def _cause(batch: Batch, model: nn.Module, place: Place) -> str:
    """States, weights, or else the numbers have grown too large."""
    for name in ("h", "layers"):
        if name not in batch:
            continue
        lines = place.batches.flat(place.numbers, batch[name].cpu()).flatten(1)
        wrong = (~lines.isfinite().all(1)).nonzero().flatten()
        if len(wrong):
            rows = place.batches.rows(place.numbers)[wrong]
            conversations, positions = place.batches.store.where(rows)
            return (
                f"{name} in the store is not finite in {len(rows)} rows of this batch, the first at position "
                f"{int(positions[0])} of conversation {int(conversations[0])} (row {int(rows[0])}); the target "
                "overflowed there: read the states again with dtype='float32' or 'bfloat16', or leave that text out"
            )
    broken = [name for name, parameter in model.named_parameters() if not parameter.detach().isfinite().all()]
    if broken:
        return (
            f"states are finite, but weights are not ({', '.join(broken[:3])}): an earlier step, or what the heads "
            f"were started from, broke them; lower learning_rate, which is {place.learning_rate:.3g} at this step, "
            "and look at the gradient norms in the log"
        )
    return (
        "states and weights are finite, so the numbers outgrew float32 in between; lower learning_rate, which is "
        f"{place.learning_rate:.3g} at this step, or max_grad_norm"
    )


def check_gradients(norms: dict[int, float], counts: torch.Tensor, model: TrainedHeads, place: Place) -> None:
    """Every head that has anything to learn in a batch learns.

    Args:
        norms: Of each set of weights; see `gradient_norms`.
        counts: [K], positions of the whole batch that each head learns from, or their weight; 0 for heads that are not
            trained yet.
        model: The heads.
        place: Where it stands.

    Raises:
        MedusaError: If a head has targets and no gradient.
    """
    sets = model.heads.num_sets
    for number in range(sets):
        positions = math.ceil(counts[number::sets].sum())
        if positions and not norms.get(number):
            raise MedusaError(
                f"every head must get a gradient, but head {number} got none at step {place.step}, from {positions} "
                "positions: its parameters are frozen, or its loss does not reach them; set requires_grad on what is "
                f"to be trained; {place.words()}"
            )


def check_targets(model: TrainedHeads, store: StateStore) -> torch.Tensor:
    """Every head has something to learn from, before any time is spent.

    Args:
        model: The heads.
        store: The train split.

    Returns:
        Int64 [K], positions that each head learns from.

    Raises:
        MedusaError: If a head has no target anywhere.
    """
    totals = torch.zeros(model.heads.config.num_heads, dtype=torch.int64)
    for rows in store.decoding_rows().split(CHUNK):
        targets = store.targets(*store.where(rows)).to(model.inverse.device)
        totals += model.positions(targets).sum(0).cpu()
    sets = model.heads.num_sets
    for number in range(sets):
        if not totals[number::sets].any():
            raise MedusaError(
                f"every head must have targets, but head {number} has none: no answer in the data is long enough to "
                "give it one within the draft vocabulary; lower num_heads or give longer answers"
            )
    return totals
