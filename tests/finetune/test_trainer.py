"""The training loop."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from medusa_spec.errors import ConfigError, MedusaError
from medusa_spec.finetune import ema, trainer
from medusa_spec.finetune.batches import StepBatches
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.teacher import run_teacher
from medusa_spec.finetune.tokens import TokenData
from medusa_spec.finetune.train import start_heads
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.finetune.trainer import held_out_accuracy, last_complete_checkpoint, train_heads

MakeConfig = Callable[..., FinetuneConfig]


def fresh(finished: FinetuneConfig, config: FinetuneConfig) -> TrainedHeads:
    target = Target(finished)
    counts = TokenData(Path(finished.output) / "data", "train").answer_counts(target.backbone.vocab_size)
    heads = start_heads(config, target.backbone, counts, target.eos_ids)
    return TrainedHeads(heads, depth_decay=0.8, loss=config.loss)


@pytest.fixture(scope="module")
def taught(finished: FinetuneConfig, tmp_path_factory: pytest.TempPathFactory) -> list[StateStore]:
    """The stores of the finished run with a teacher beside them."""
    output = tmp_path_factory.mktemp("taught") / "run"
    shutil.copytree(finished.output, output)
    config = replace(finished, output=str(output), top_logits=16)
    run_teacher(config, Target(config))
    return [StateStore(output, split, 3, teacher=True) for split in ("train", "held_out")]


def stores(finished: FinetuneConfig) -> list[StateStore]:
    return [StateStore(Path(finished.output), split, 3) for split in ("train", "held_out")]


def test_training_learns(finished: FinetuneConfig, make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path, learning_rate=0.03, epochs=8, draft_vocab_size=None, num_layers=2, lm_head="own")
    history = train_heads(fresh(finished, config), *stores(finished), config, tmp_path)
    losses = [entry["loss_head_0"] for entry in history if "loss_head_0" in entry]
    assert losses[-1] < 0.6 * losses[0]
    top1 = [entry["top1_head_0"] for entry in history if "top1_head_0" in entry]
    assert len(top1) == 8 and top1[-1] > 0.3


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lm_head": "own"},
        {"lm_head": "low_rank"},
        {"ema": 0.9},
        {"lm_head": "low_rank", "learning_rates": {"up": 0.1, "heads.1": 2.0}, "weight_decay": 0.1, "ema": 0.5},
        {"loss": "lk"},
        {"loss": "log_acceptance", "lm_head": "own", "ema": 0.9},
    ],
    ids=str,
)
def test_a_stopped_and_resumed_training_gives_the_same_bits(
    finished: FinetuneConfig,
    taught: list[StateStore],
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
) -> None:
    config = make_config(tmp_path, rank=3, **changes)
    data = taught if "loss" in changes else stores(finished)
    whole = fresh(finished, config)
    history = train_heads(whole, *data, config, tmp_path / "whole")
    read = StepBatches.__getitem__

    def stop(self: StepBatches, step: int) -> dict[str, torch.Tensor]:
        if step == 11:
            raise KeyboardInterrupt
        return read(self, step)

    monkeypatch.setattr(StepBatches, "__getitem__", stop)
    with pytest.raises(KeyboardInterrupt):
        train_heads(fresh(finished, config), *data, config, tmp_path / "stopped")
    monkeypatch.setattr(StepBatches, "__getitem__", read)
    checkpoint = last_complete_checkpoint(tmp_path / "stopped")
    assert checkpoint is not None and checkpoint.name == "checkpoint-8"
    resumed = fresh(finished, config)
    again = train_heads(resumed, *data, config, tmp_path / "stopped")
    before, after = whole.state_dict(), resumed.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    measured = [[entry for entry in log if "top1_head_0" in entry] for log in (history, again)]
    assert measured[0][-1] == measured[1][-1]


def test_the_average_is_what_is_evaluated_and_kept_and_training_goes_on_from_the_weights(
    finished: FinetuneConfig, make_config: MakeConfig, tmp_path: Path
) -> None:
    plain, averaged = (make_config(tmp_path / name, ema=ema) for name, ema in (("plain", 0.0), ("averaged", 0.8)))
    models, logs = [], []
    for config in (plain, averaged):
        models.append(fresh(finished, config))
        logs.append(train_heads(models[-1], *stores(finished), config, Path(config.output)))
    assert [e["loss"] for e in logs[0] if "loss" in e] == [e["loss"] for e in logs[1] if "loss" in e]
    folder = Path(averaged.output) / "checkpoint-34"
    raw = load_file(folder / "model.safetensors")
    state = {name: tensor for name, tensor in models[0].state_dict().items() if name in raw}
    assert raw.keys() == state.keys() and all(torch.equal(raw[name], state[name]) for name in raw)
    average = load_file(folder / ema.FILE_NAME)
    kept = models[1].state_dict()
    assert average and all(torch.equal(kept[name], tensor) for name, tensor in average.items())
    assert any(not torch.equal(raw[name], tensor) for name, tensor in average.items())
    found = held_out_accuracy(models[1], stores(finished)[1])
    assert {name: logs[1][-2 if "train_runtime" in logs[1][-1] else -1][name] for name in found} == found


@pytest.mark.parametrize("loss", ["kl", "total_variation", "log_acceptance", "lk"])
def test_every_loss_brings_the_heads_nearer_to_the_target(
    finished: FinetuneConfig, taught: list[StateStore], make_config: MakeConfig, tmp_path: Path, loss: str
) -> None:
    config = make_config(tmp_path, learning_rate=0.03, epochs=3, draft_vocab_size=None, lm_head="own", loss=loss)
    model = fresh(finished, config)
    before = held_out_accuracy(model, taught[1])
    history = train_heads(model, *taught, config, tmp_path)
    after = held_out_accuracy(model, taught[1])
    losses = [entry["loss_head_0"] for entry in history if "loss_head_0" in entry]
    assert losses[-1] < 0.95 * losses[0]
    assert all(after[f"overlap_head_{k}"] > 1.05 * before[f"overlap_head_{k}"] for k in range(3)), (before, after)


def test_a_part_with_a_lower_rate_moves_less(finished: FinetuneConfig, make_config: MakeConfig, tmp_path: Path) -> None:
    moved = []
    for name, rates in (("usual", {}), ("slow", {"lm_head": 1e-4})):
        config = make_config(tmp_path / name, lm_head="own", learning_rates=rates, max_steps=5)
        model = fresh(finished, config)
        start = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        train_heads(model, *stores(finished), config, tmp_path / name)
        moved.append({key: float((t - start[key]).abs().max()) for key, t in model.state_dict().items()})
    for key in moved[0]:
        if "lm_head" in key:
            assert moved[1][key] < 1e-3 * moved[0][key]
        elif "blocks" in key:
            assert moved[1][key] > 0.5 * moved[0][key] > 0


def test_a_part_that_the_heads_do_not_have_is_refused_before_training(
    finished: FinetuneConfig, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path, learning_rates={"lm_head": 0.1})
    with pytest.raises(ConfigError, match="learning_rates must name parts .* are .*blocks.*linear.* got 'lm_head'"):
        train_heads(fresh(finished, config), *stores(finished), config, tmp_path)


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
