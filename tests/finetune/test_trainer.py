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
from medusa_spec.finetune.trainer import check_trackers, last_complete_checkpoint, train_heads
from medusa_spec.finetune.watch import held_out_accuracy

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
    last = [entry for entry in logs[1] if "top1_head_0" in entry][-1]
    assert {name: last[name] for name in found} == found


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


@pytest.mark.parametrize("changes", [{}, {"max_steps": 8, "ema": 0.5}])
def test_a_training_that_had_only_to_be_noted_as_done_is_not_trained_on(
    finished: FinetuneConfig, make_config: MakeConfig, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = make_config(tmp_path, **changes)
    states = []
    for _ in range(2):
        model = fresh(finished, config)
        history = train_heads(model, *stores(finished), config, tmp_path)
        states.append(model.state_dict())
        assert history[-1]["step"] == (8 if changes else 34)
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


def without_times(history: list[dict[str, float]]) -> list[dict[str, float]]:
    times = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "decoder_seconds")
    return [{name: value for name, value in entry.items() if name not in times} for entry in history]


def test_a_stopped_and_resumed_training_logs_the_same(
    finished: FinetuneConfig, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, save_steps=5)
    whole = train_heads(fresh(finished, config), *stores(finished), config, tmp_path / "whole")
    read = StepBatches.__getitem__

    def stop(self: StepBatches, step: int) -> dict[str, torch.Tensor]:
        if step == 23:
            raise KeyboardInterrupt
        return read(self, step)

    monkeypatch.setattr(StepBatches, "__getitem__", stop)
    with pytest.raises(KeyboardInterrupt):
        train_heads(fresh(finished, config), *stores(finished), config, tmp_path / "stopped")
    monkeypatch.setattr(StepBatches, "__getitem__", read)
    resumed = train_heads(fresh(finished, config), *stores(finished), config, tmp_path / "stopped")
    assert without_times(resumed) == without_times(whole)


@pytest.mark.parametrize("options", [{}, {"kind": "hydra", "lm_head": "low_rank", "rank": 3}])
def test_a_step_in_eight_pieces_is_the_step_in_one(
    options: dict[str, Any], finished: FinetuneConfig, make_config: MakeConfig, tmp_path: Path
) -> None:
    found = []
    for accumulation in (1, 8):
        config = make_config(tmp_path, gradient_accumulation=accumulation, max_steps=12, weight_decay=0.1, **options)
        model = fresh(finished, config).double()
        history = train_heads(model, *stores(finished), config, tmp_path / str(accumulation))
        found.append((model.state_dict(), history))
    (one, logged), (eight, also) = found
    start = fresh(finished, config).state_dict()
    for name in one:
        torch.testing.assert_close(eight[name], one[name], rtol=1e-10, atol=1e-11)
        assert name == "heads.draft_ids" or not torch.equal(one[name].float(), start[name])
    for name in ("loss", "grad_norm", "loss_head_2", "grad_norm_head_1", "top1_head_0"):
        assert [e[name] for e in also if name in e] == pytest.approx([e[name] for e in logged if name in e], rel=1e-5)


def test_the_log_tells_norms_that_make_up_the_whole_gradient(
    finished: FinetuneConfig, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path, max_steps=4)
    for entry in train_heads(fresh(finished, config), *stores(finished), config, tmp_path):
        if "grad_norm" in entry:
            parts = [entry[f"grad_norm_head_{k}"] for k in range(3)]
            assert sum(part**2 for part in parts) ** 0.5 == pytest.approx(entry["grad_norm"], rel=1e-3)


def test_a_tracker_is_given_losses_norms_and_held_out_figures(
    finished: FinetuneConfig, make_config: MakeConfig, tmp_path: Path
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = make_config(tmp_path, report_to="tensorboard", epochs=1)
    check_trackers(config)
    history = train_heads(fresh(finished, config), *stores(finished), config, tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    events = accumulator.EventAccumulator(str(folder)).Reload()
    names = events.Tags()["scalars"]
    for name in ("loss", "learning_rate", "loss_head_0", "grad_norm_head_2"):
        shown = [event.value for event in events.Scalars(f"train/{name}")]
        assert shown == pytest.approx([entry[name] for entry in history if name in entry], rel=1e-5)
    assert {"eval/top1_head_0", "eval/top5_head_2"} <= set(names)
    assert [entry["top1_head_0"] for entry in history if "top1_head_0" in entry] == pytest.approx(
        [event.value for event in events.Scalars("eval/top1_head_0")]
    )


@pytest.mark.parametrize("name", ["nothing", "comet_ml"])
def test_a_tracker_that_is_not_there_is_named_at_once(make_config: MakeConfig, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"report_to must name trackers that are installed, got '{name}'"):
        check_trackers(make_config(tmp_path, report_to=(name,)))
