"""The training loop: `transformers.Trainer` over stored batches, resumable to the bit."""

import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from medusa_spec.errors import MedusaError
from medusa_spec.finetune.batches import StepBatches, in_order, step_batches
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.ema import WeightAverage
from medusa_spec.finetune.learning_rates import check_parts, split_groups
from medusa_spec.finetune.overlap import measure_overlap
from medusa_spec.finetune.ranks import accuracy, measure_ranks
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.trained import TrainedHeads

COMPLETE = "complete"
"""Written into a checkpoint last: a kill may leave one that is half written."""
HELD_OUT_POSITIONS = 1 << 15


class HeadsTrainer(Trainer):
    """Trains `TrainedHeads` on `StepBatches`, in order, one item a step."""

    model: TrainedHeads

    def __init__(self, *args: Any, config: FinetuneConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config = config
        self.average = WeightAverage(self.model, config.ema) if config.ema else None
        self.head_losses: list[torch.Tensor] = []

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(cast(StepBatches, train_dataset or self.train_dataset))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The usual one, its groups split where parts of the heads have a learning rate of their own."""
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if fresh and self.config.learning_rates:
            groups = split_groups(optimizer.param_groups, self.model, self.config.learning_rates)
            optimizer.param_groups[:] = groups
        return optimizer

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *args: Any, **kwargs: Any) -> Any:
        """The weighted loss, unless a head's is not a number."""
        self.model.unroll = self.config.unroll_at(self.state.global_step / max(1, self.state.max_steps))
        out = model(**inputs)
        finite = out["losses"].isfinite()
        if not finite.all():
            head = int((~finite).nonzero()[0])
            raise MedusaError(
                f"the loss of head {head} is {float(out['losses'][head])} at step {self.state.global_step}; the states "
                "or the learning rate are at fault: look for non-finite h in the store, or lower learning_rate"
            )
        self.head_losses.append(out["losses"])
        return (out["loss"], out) if return_outputs else out["loss"]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds each head's loss since the last log."""
        if "loss" in logs and self.head_losses:
            trained = min(len(losses) for losses in self.head_losses)  # the number of steps may have grown
            means = torch.stack([losses[:trained] for losses in self.head_losses]).mean(0).tolist()
            logs |= {f"loss_head_{k}": round(value, 4) for k, value in enumerate(means)}
            self.head_losses = []
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        if self.average is not None:
            self.average.save(folder)
        (folder / COMPLETE).touch()


class _HeldOut(TrainerCallback):
    """Keeps the average of the weights, and logs the heads' accuracy on held-out states after every epoch and at the
    end: that of the average, if there is one."""

    def __init__(self, store: StateStore, steps_per_epoch: int) -> None:
        self.store, self.steps_per_epoch = store, steps_per_epoch
        self.trainer: HeadsTrainer | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer is None:
            return
        average = self.trainer.average
        if average is not None:
            average.update(state.global_step)
        ends = state.global_step == state.max_steps
        if ends or state.global_step % self.steps_per_epoch == 0:
            with nullcontext() if average is None else average.applied():
                found = held_out_accuracy(self.trainer.model, self.store)
            self.trainer.log(found)


def held_out_accuracy(model: TrainedHeads, store: StateStore) -> dict[str, float]:
    """Top-1 and top-5 accuracy by head, as flat names for the log; `overlap`, too, if the store has a teacher."""
    read = partial(in_order, store, attends=model.heads.attends)
    ranks = measure_ranks(model, read(), HELD_OUT_POSITIONS)
    shares = {f"top{top}": accuracy(ranks, top) for top in (1, 5)}
    if store.teacher is not None:
        shares["overlap"] = measure_overlap(model, read(), HELD_OUT_POSITIONS)
    return {f"{name}_head_{k}": round(share, 4) for name, by_head in shares.items() for k, share in enumerate(by_head)}


def only_item(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collates nothing: an item is a batch already."""
    return items[0]


def last_complete_checkpoint(folder: Path) -> Path | None:
    """The latest checkpoint that was written to its end; broken ones are removed."""
    complete = []
    for path in folder.glob("checkpoint-*"):
        if (path / COMPLETE).exists():
            complete.append(path)
        else:
            shutil.rmtree(path)
    return max(complete, key=lambda path: int(path.name.split("-")[1]), default=None)


def training_arguments(config: FinetuneConfig, folder: Path, steps: int, device: torch.device) -> TrainingArguments:
    """Arguments of a deterministic run of `steps` steps."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=1,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        lr_scheduler_type="cosine",
        warmup_steps=int(config.warmup * steps),
        max_grad_norm=config.max_grad_norm,
        optim="adamw_torch",
        logging_steps=max(1, min(50, steps // 20)),
        save_strategy="steps",
        save_steps=config.save_steps,
        save_total_limit=2,
        seed=config.seed,
        use_cpu=device.type == "cpu",
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        report_to="none",
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # DataParallel would leave the frozen LM head on one device
    return arguments


def train_heads(
    model: TrainedHeads, train: StateStore, held_out: StateStore, config: FinetuneConfig, folder: Path
) -> list[dict[str, float]]:
    """Trains in place, from the last complete checkpoint in `folder` if there is one.

    Returns:
        The log: losses by head, learning rate, held-out accuracy after each epoch.

    Raises:
        ConfigError: If a part that is to have a learning rate of its own is none of the heads'.
    """
    check_parts([name for name, p in model.named_parameters() if p.requires_grad], config.learning_rates)
    batches = step_batches(
        train,
        attends=model.heads.attends,
        batch_positions=config.batch_positions,
        epochs=config.epochs,
        seed=config.seed,
    )
    watch = _HeldOut(held_out, batches.steps_per_epoch)
    device = model.heads.projection.weight.device
    trainer = HeadsTrainer(
        model=model,
        args=training_arguments(config, folder, min(len(batches), config.max_steps or len(batches)), device),
        train_dataset=batches,
        data_collator=only_item,
        callbacks=[watch],
        config=config,
    )
    watch.trainer = trainer
    checkpoint = last_complete_checkpoint(folder)
    if checkpoint is not None and trainer.average is not None:
        trainer.average.load(checkpoint)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if trainer.average is not None:
        trainer.average.apply()
    return list(trainer.state.log_history)
