"""The training loop: `transformers.Trainer` over stored batches, resumable to the bit."""

import math
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from medusa_spec.errors import ConfigError, MedusaError
from medusa_spec.finetune.batches import Batch, step_batches
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.ema import WeightAverage
from medusa_spec.finetune.gradients import gradient_norms
from medusa_spec.finetune.guards import Place, check_gradients, check_targets, stop_for_gradient, stop_for_loss
from medusa_spec.finetune.learning_rates import check_parts, split_groups
from medusa_spec.finetune.pieces import Pieces, answers
from medusa_spec.finetune.processes import everyone
from medusa_spec.finetune.sharded import put_together, unsharded_copy, whole_state
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.finetune.watch import HeldOutWatch
from medusa_spec.finetune.watch_decoder import DecoderWatch
from medusa_spec.finetune.window import Window

COMPLETE = "complete"
"""Written into a checkpoint last: a kill may leave one that is half written."""

SLOPED = ("cross_entropy", "kl")
"""Losses that always have a gradient; the others have none where a head claims enough already."""

HELD_OUT = "eval_"
"""Before the names of held-out figures where they are reported: TensorBoard then shows them apart."""


class HeadsTrainer(Trainer):
    """Trains `TrainedHeads` on `Pieces`, in their order."""

    model: TrainedHeads
    train_dataset: Pieces

    def __init__(self, *args: Any, config: FinetuneConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config, self.window, self.piece = config, Window(), 0
        self.average = WeightAverage(self.model, config.ema) if config.ema else None
        self.plain = unsharded_copy(self.model) if self.is_fsdp_enabled else None
        if self.plain is not None and config.ema:
            raise ConfigError(f"ema must be 0 where FSDP spreads the weights, got {config.ema}")

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """This process's pieces, which are shared out already: accelerate would do it again."""
        return DataLoader(self.train_dataset, batch_size=1, collate_fn=only_item)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One piece forward and backward; after the last of a step its gradients are looked at."""
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.piece += 1
        if self.piece == self.train_dataset.accumulation:
            self.window.add_norms(self.norms(inputs))
            self.piece = 0
        return loss

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
        losses, counts = out["losses"], inputs.get("counts")
        if not losses.isfinite().all():
            raise self.stopped(losses, inputs)
        masked = not losses.any() if counts is None else not counts[1, 0].any()
        self.window.add_losses(losses, piece=self.piece, masked=bool(masked))
        # Trainer takes the mean over the pieces of a step, and several processes over theirs; ours add up.
        pieces = self.train_dataset.per_step
        loss = out["loss"] if pieces == 1 else out["loss"] * pieces
        return (loss, out) if return_outputs else loss

    def stopped(self, losses: torch.Tensor, inputs: Batch) -> MedusaError:
        """The error for losses [K] that are no numbers."""
        return stop_for_loss(losses, inputs, self.model, self._place())

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds each head's loss and gradient norm since the last log."""
        if "loss" in logs:
            logs |= self.window.drain(self._total)
        super().log(logs, *args, **kwargs)

    def log_held_out(self, figures: dict[str, float]) -> None:
        """Logs figures of held-out data: to trackers under names of their own, into the history as they are."""
        super().log({f"{HELD_OUT}{name}": value for name, value in figures.items()})
        last = self.state.log_history[-1]
        self.state.log_history[-1] = {name.removeprefix(HELD_OUT): value for name, value in last.items()}

    def whole_model(self) -> TrainedHeads | None:
        """The heads as they are, for the main process to measure; all must ask at the same time."""
        if self.plain is None:
            return self.model if self.is_world_process_zero() else None
        self.plain.load_state_dict(whole_state(self.model))
        return self.plain if self.is_world_process_zero() else None

    def gradient_norms(self) -> dict[int, float]:
        """Of each head's weights."""
        return gradient_norms(self.model)

    def norms(self, inputs: Batch) -> dict[int, float]:
        """Each head's gradient norm at the end of a step, which stops where one is no number or has no cause."""
        norms = self.gradient_norms()
        if not all(map(math.isfinite, norms.values())):
            raise stop_for_gradient(norms, inputs, self.model, self._place(self.piece - 1))
        if not all(norms.get(number) for number in range(self.model.heads.num_sets)) and self.model.loss in SLOPED:
            counts = inputs["counts"][1] if "counts" in inputs else self.model.counts(**answers(inputs))
            steps = torch.arange(counts.shape[1]) < (self.model.unroll or counts.shape[1])
            trained = counts[0].cpu() * steps
            check_gradients(norms, trained, self.model, self._place(self.piece - 1))
        return norms

    def _place(self, piece: int | None = None) -> Place:
        step = self.state.global_step
        return Place(
            step=step,
            batches=self.train_dataset.batches,
            numbers=self.train_dataset.part(step, self.piece if piece is None else piece),
            learning_rate=float(self._get_learning_rate()),
        )

    def _total(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.args.world_size == 1:
            return tensor
        return cast(torch.Tensor, self.accelerator.reduce(tensor, reduction="sum"))

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        self.accelerator.wait_for_everyone()  # each process has written its own part
        if self.is_world_process_zero():
            folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
            if self.average is not None:
                self.average.save(folder)
            (folder / COMPLETE).touch()


def only_item(items: list[Batch]) -> Batch:
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
        gradient_accumulation_steps=config.gradient_accumulation,
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
        ddp_find_unused_parameters=False,
        report_to=list(config.report_to) or "none",
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # DataParallel would leave the frozen LM head on one device
    return arguments


def train_heads(
    model: TrainedHeads,
    train: StateStore,
    held_out: StateStore,
    config: FinetuneConfig,
    folder: Path,
    decoder: DecoderWatch | None = None,
) -> list[dict[str, float]]:
    """Trains in place, from the last complete checkpoint in `folder` if there is one.

    Under a launcher every process calls it; a step's batch is shared among them, and all end with the same weights.

    Args:
        model: Heads with their loss.
        train: States to learn from.
        held_out: States to measure on.
        config: Recipe.
        folder: For checkpoints.
        decoder: Measures acceptance beside accuracy; None does not.

    Returns:
        The log: losses and gradient norms by head, learning rate, held-out figures after each epoch.

    Raises:
        ConfigError: If a part that is to have a learning rate of its own is none of the heads', or a setting cannot be
            kept to in pieces.
        MedusaError: If a head has nothing to learn from, or a number is none.
    """
    check_parts([name for name, p in model.named_parameters() if p.requires_grad], config.learning_rates)
    check_targets(model, train)
    batches = step_batches(
        train,
        attends=model.heads.attends,
        batch_positions=config.batch_positions,
        epochs=config.epochs,
        seed=config.seed,
    )
    steps, processes = min(len(batches), config.max_steps or len(batches)), everyone()
    if model.loss == "lk" and config.gradient_accumulation * processes.count > 1:
        raise ConfigError(
            "loss 'lk' mixes two means by a third one over all positions of a step, which only a step in one piece "
            f"knows, got gradient_accumulation {config.gradient_accumulation} and {processes.count} processes; use "
            "another loss"
        )
    watch = HeldOutWatch(held_out, decoder, batches.steps_per_epoch)
    device = model.heads.projection.weight.device
    if processes.main:
        last_complete_checkpoint(folder)  # removes broken ones before anybody looks
    processes.wait()
    trainer = HeadsTrainer(
        model=model,
        args=training_arguments(config, folder, steps, device),
        train_dataset=Pieces(
            batches, model.counts, steps=steps, accumulation=config.gradient_accumulation, processes=processes
        ),
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
    put_together(model)
    return list(trainer.state.log_history)


def check_trackers(config: FinetuneConfig) -> None:
    """What is to be reported to is there.

    Raises:
        ConfigError: If a tracker is unknown or not installed.
    """
    from transformers.integrations import get_reporting_integration_callbacks

    for name in config.report_to:
        try:
            for callback in get_reporting_integration_callbacks([name]):
                callback()
        except (ValueError, RuntimeError, ImportError) as error:
            raise ConfigError(f"report_to must name trackers that are installed, got {name!r}: {error}") from error
