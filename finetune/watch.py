"""What is looked at while heads are trained: their accuracy on held-out states, and the decoder's acceptance."""

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from medusa_spec.finetune.batches import in_order
from medusa_spec.finetune.overlap import measure_overlap
from medusa_spec.finetune.ranks import accuracy, measure_ranks
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.finetune.watch_decoder import DecoderWatch

if TYPE_CHECKING:
    from medusa_spec.finetune.trainer import HeadsTrainer

HELD_OUT_POSITIONS = 1 << 15
"""Spread over all that there are."""


class HeldOutWatch(TrainerCallback):
    """Keeps the average of the weights, measures after every epoch and at the end (the average, if there is one), and
    closes a line of the log with every checkpoint.

    A run that goes on from a checkpoint then logs what it would have logged without a stop.

    Args:
        store: Held-out states.
        decoder: Decodes held-out prompts, or None.
        steps_per_epoch: As it says.
    """

    def __init__(self, store: StateStore, decoder: DecoderWatch | None, steps_per_epoch: int) -> None:
        self.store, self.decoder, self.steps_per_epoch = store, decoder, steps_per_epoch
        self.trainer: HeadsTrainer | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See the class."""
        due = control.should_log or control.should_save
        if self.trainer is not None:
            self._look(self.trainer, state)
        control.should_log = due  # logging has cleared it, in the main process alone

    def _look(self, trainer: "HeadsTrainer", state: Any) -> None:
        average = trainer.average
        if average is not None:
            average.update(state.global_step)
        if state.global_step != state.max_steps and state.global_step % self.steps_per_epoch:
            return
        with nullcontext() if average is None else average.applied():
            model = trainer.whole_model()
            found = None if model is None else self.measure(model)
        if found is not None:  # the main process
            trainer.log_held_out(found)

    def measure(self, model: TrainedHeads) -> dict[str, float]:
        """Figures of heads as they are."""
        decoded = {} if self.decoder is None else self.decoder.measure(model.heads)
        return held_out_accuracy(model, self.store) | decoded


def held_out_accuracy(model: TrainedHeads, store: StateStore) -> dict[str, float]:
    """Top-1 and top-5 accuracy by head, as flat names for the log; `overlap`, too, if the store has a teacher."""
    read = partial(in_order, store, attends=model.heads.attends, limit=HELD_OUT_POSITIONS)
    ranks = measure_ranks(model, read())
    shares = {f"top{top}": accuracy(ranks, top) for top in (1, 5)}
    if store.teacher is not None:
        shares["overlap"] = measure_overlap(model, read())
    return {f"{name}_head_{k}": round(share, 4) for name, by_head in shares.items() for k, share in enumerate(by_head)}
