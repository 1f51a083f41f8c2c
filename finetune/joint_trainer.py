"""The training loop of heads and target together: that of heads, on texts. Knows no stage."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from medusa_spec.errors import ConfigError, MedusaError
from medusa_spec.finetune.batches import TextBatches
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.gradients import gradient_norms
from medusa_spec.finetune.joint_batches import TokenTexts
from medusa_spec.finetune.joint_model import JointModel
from medusa_spec.finetune.learning_rates import check_parts
from medusa_spec.finetune.pieces import Pieces
from medusa_spec.finetune.processes import everyone
from medusa_spec.finetune.trainer import HeadsTrainer, last_complete_checkpoint, training_arguments


class JointTrainer(HeadsTrainer):
    """Also logs the loss that keeps the target as it is, and the gradient norm of its adapter."""

    model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.target_losses: list[torch.Tensor] = []
        self.target_norms: list[float] = []

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *args: Any, **kwargs: Any) -> Any:
        """See `HeadsTrainer`."""
        loss, out = super().compute_loss(model, inputs, True)
        if not out["target_loss"].isfinite():
            raise MedusaError(
                f"the target's loss is {float(out['target_loss'])} at step {self.state.global_step}; lower "
                f"target_learning_rate; {self._place().words()}"
            )
        if self.piece:
            self.target_losses[-1] = self.target_losses[-1] + out["target_loss"]
        else:
            self.target_losses.append(out["target_loss"])
        return (loss, out) if return_outputs else loss

    def gradient_norms(self) -> dict[int, float]:
        """Of each head; the adapter's is noted apart."""
        self.target_norms.append(sum(norm**2 for norm in gradient_norms(self.model.target).values()) ** 0.5)
        return gradient_norms(self.model.trained)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """See `HeadsTrainer`."""
        if "loss" in logs and self.target_losses:
            logs["target_loss"] = round(float(self._total(torch.stack(self.target_losses).mean())), 5)
            logs["grad_norm_target"] = float(f"{sum(self.target_norms) / max(1, len(self.target_norms)):.4g}")
            self.target_losses, self.target_norms = [], []
        super().log(logs, *args, **kwargs)


def train_jointly(model: JointModel, texts: TokenTexts, config: FinetuneConfig, folder: Path) -> list[dict[str, float]]:
    """Trains in place, from the last complete checkpoint in `folder` if there is one.

    Under a launcher every process calls it; a step's batch is shared among them, and all end with the same weights.

    Args:
        model: Heads and target with their loss.
        texts: To learn from.
        config: Recipe.
        folder: For checkpoints.

    Returns:
        The log.

    Raises:
        ConfigError: Under FSDP, or if a part that is to have a learning rate of its own is none of the heads'.
        MedusaError: If a loss is not a number, or a head has no gradient.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise ConfigError(
            "target_rank must be None under FSDP, which would shard the frozen target; use plain processes"
        )
    run = replace(  # as a training of heads
        config,
        target_rank=None,
        target_alpha=None,
        learning_rate=config.target_learning_rate,
        learning_rates=config.learning_rates | {"trained": config.heads_rate},
        unroll_ramp=0.0,  # all steps have been trained before
        ema=0.0,
    )
    source: Any = texts
    batches = TextBatches(
        source, batch_positions=config.joint_batch_tokens, epochs=config.joint_epochs, seed=config.seed
    )
    check_parts([name for name, p in model.trained.named_parameters() if p.requires_grad], config.learning_rates)
    processes = everyone()
    if processes.main:
        last_complete_checkpoint(folder)  # removes broken ones before anybody looks
    processes.wait()
    steps = min(len(batches), config.joint_max_steps or len(batches))
    trainer = JointTrainer(
        model=model,
        args=training_arguments(run, folder, steps, model.projection.weight.device),
        train_dataset=Pieces(
            batches, model.counts, steps=steps, accumulation=config.gradient_accumulation, processes=processes
        ),
        config=run,
    )
    checkpoint = last_complete_checkpoint(folder)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return list(trainer.state.log_history)
