"""The training loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_spec.errors import MedusaError
from medusa_spec.finetune import trainer
from medusa_spec.finetune.batches import StepBatches
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.tokens import TokenData
from medusa_spec.finetune.train import start_heads
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.finetune.trainer import last_complete_checkpoint, train_heads

MakeConfig = Callable[..., FinetuneConfig]


def fresh(finished: FinetuneConfig, config: FinetuneConfig) -> TrainedHeads:
    target = Target(finished)
    counts = TokenData(Path(finished.output) / "data", "train").answer_counts(target.backbone.vocab_size)
    return TrainedHeads(start_heads(config, target.backbone, counts, target.eos_ids), depth_decay=0.8)


def stores(finished: FinetuneConfig) -> list[StateStore]:
    return [StateStore(Path(finished.output), split, 3) for split in ("train", "held_out")]


def test_training_learns(finished: FinetuneConfig, make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path, learning_rate=0.03, epochs=8, draft_vocab_size=None, num_layers=2, lm_head="own")
    history = train_heads(fresh(finished, config), *stores(finished), config, tmp_path)
    losses = [entry["loss_head_0"] for entry in history if "loss_head_0" in entry]
    assert losses[-1] < 0.6 * losses[0]
    top1 = [entry["top1_head_0"] for entry in history if "top1_head_0" in entry]
    assert len(top1) == 8 and top1[-1] > 0.3


@pytest.mark.parametrize("lm_head", ["shared", "own", "low_rank"])
def test_a_stopped_and_resumed_training_gives_the_same_bits(
    finished: FinetuneConfig, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lm_head: Any
) -> None:
    config = make_config(tmp_path, lm_head=lm_head, rank=3)
    whole = fresh(finished, config)
    train_heads(whole, *stores(finished), config, tmp_path / "whole")
    read = StepBatches.__getitem__

    def stop(self: StepBatches, step: int) -> dict[str, torch.Tensor]:
        if step == 11:
            raise KeyboardInterrupt
        return read(self, step)

    monkeypatch.setattr(StepBatches, "__getitem__", stop)
    with pytest.raises(KeyboardInterrupt):
        train_heads(fresh(finished, config), *stores(finished), config, tmp_path / "stopped")
    monkeypatch.setattr(StepBatches, "__getitem__", read)
    checkpoint = last_complete_checkpoint(tmp_path / "stopped")
    assert checkpoint is not None and checkpoint.name == "checkpoint-8"
    resumed = fresh(finished, config)
    train_heads(resumed, *stores(finished), config, tmp_path / "stopped")
    before, after = whole.state_dict(), resumed.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_training_that_had_only_to_be_noted_as_done_is_not_trained_on(
    finished: FinetuneConfig, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path)
    states = []
    for _ in range(2):
        model = fresh(finished, config)
        history = train_heads(model, *stores(finished), config, tmp_path)
        states.append(model.state_dict())
        assert history[-1]["step"] == 34
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_half_written_checkpoint_is_not_used(tmp_path: Path) -> None:
    for step in (8, 100, 200):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (8, 100):
        (tmp_path / f"checkpoint-{step}" / trainer.COMPLETE).touch()
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-100"
    assert not (tmp_path / "checkpoint-200").exists()
    assert last_complete_checkpoint(tmp_path / "none") is None


def test_a_loss_that_is_no_number_stops_and_names_head_and_step(
    finished: FinetuneConfig, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path)
    model = fresh(finished, config)
    with torch.no_grad():
        model.heads.heads[1].blocks[0].linear.weight[0, 0] = float("nan")
    with pytest.raises(MedusaError, match="loss of head 1 is nan at step 0"):
        train_heads(model, *stores(finished), config, tmp_path)
