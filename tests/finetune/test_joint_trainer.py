"""The loop of joint training: the same result in any pieces, figures of both parts, stops with their cause."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from medusa_spec.backbone import Backbone
from medusa_spec.errors import ConfigError, MedusaError
from medusa_spec.finetune import run_pipeline
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.joint_batches import TokenTexts
from medusa_spec.finetune.joint_model import JointModel
from medusa_spec.finetune.joint_trainer import train_jointly
from medusa_spec.finetune.lora import adapt_target
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.train import read_heads
from medusa_spec.finetune.trained import TrainedHeads

MakeConfig = Callable[..., FinetuneConfig]
STEPS = 5
JOINT: dict[str, Any] = {
    "target_rank": 4,
    "target_learning_rate": 0.003,
    "heads_rate": 3.0,
    "heads_weight": 0.5,
    "joint_batch_tokens": 1024,
    "joint_max_steps": STEPS,
}


def made(finished: FinetuneConfig) -> JointModel:
    """The finished run's heads on its target, with a fresh adapter, in float64."""
    target = Target(replace(finished, dtype="float64"))
    heads = read_heads(finished, target.backbone, "train", rounded=False).requires_grad_(True).double()
    backbone = Backbone(adapt_target(target.release(), rank=4, alpha=2.0, seed=0))
    trained = TrainedHeads(heads, depth_decay=0.8).double()
    return JointModel(backbone, trained, heads_weight=0.5, target_loss="kl")


def trained(finished: FinetuneConfig, folder: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """State and log."""
    model = made(finished)
    config = replace(finished, **(JOINT | changes))
    texts = TokenTexts(Path(finished.output), "train", finished.num_heads)
    history = train_jointly(model, texts, config, folder)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, history


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tolerance: float) -> None:
    """Equal but for roundings: where a gradient is nothing else, AdamW makes a whole step of it."""
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert float((two[name] - tensor).float().norm()) <= tolerance * float(tensor.float().norm()), name


def test_any_number_of_pieces_gives_the_same_training(finished: FinetuneConfig, tmp_path: Path) -> None:
    whole, logged = trained(finished, tmp_path / "one")
    pieces, again = trained(finished, tmp_path / "three", gradient_accumulation=3)
    same(whole, pieces, 1e-4)  # norms of the target are in float32
    for name in ("loss", "target_loss", "loss_head_1", "grad_norm_head_0", "grad_norm_target"):
        curves = [[entry[name] for entry in log if name in entry] for log in (logged, again)]
        assert len(curves[0]) == STEPS and curves[1] == pytest.approx(curves[0], rel=1e-3, abs=2e-5)


def test_the_adapter_moves_only_once_the_heads_gradient_has_reached_it(
    finished: FinetuneConfig, tmp_path: Path
) -> None:
    _, history = trained(finished, tmp_path)
    losses = [entry["target_loss"] for entry in history if "target_loss" in entry]
    assert losses[0] == 0.0 and losses[-1] > 0
    assert all(entry["grad_norm_target"] > 0 for entry in history if "grad_norm_target" in entry)


def test_a_number_that_is_none_stops_it_and_names_the_batch(finished: FinetuneConfig, tmp_path: Path) -> None:
    model = made(finished)
    for name, parameter in model.target.named_parameters():
        if ".lora_A" in name:
            parameter.data.fill_(float("inf"))
    texts = TokenTexts(Path(finished.output), "train", finished.num_heads)
    with pytest.raises(MedusaError, match=r"the loss of head 0 is nan at step 0: .*the batch: \d+ rows of train conv"):
        train_jointly(model, texts, replace(finished, **JOINT), tmp_path)


def test_fsdp_is_refused(finished: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="target_rank must be None under FSDP"):
        train_jointly(made(finished), None, replace(finished, **JOINT), tmp_path)


@pytest.mark.slow
def test_two_processes_train_what_one_does(
    finished: FinetuneConfig, command_line: Callable[..., list[str]], tmp_path: Path
) -> None:
    outputs = [tmp_path / "one", tmp_path / "two"]
    for output in outputs:
        output.mkdir()
        for name in ("data*", "states*", "train*"):
            for path in Path(finished.output).glob(name):
                (shutil.copytree if path.is_dir() else shutil.copy)(path, output / path.name)
    config = replace(finished, **JOINT)
    run_pipeline(replace(config, output=str(outputs[0])), stages=("joint",))
    words = command_line(config, output=str(outputs[1]))
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--main_process_port", "0"]
    done = subprocess.run(
        [sys.executable, *launch, "-m", "medusa_spec", *words, "--stage", "joint"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (load_file(output / "joint" / "trained.safetensors") for output in outputs)
    same(one, two, 0.03)  # in float32
    logs = [json.loads((output / "joint" / "history.json").read_text()) for output in outputs]
    for name in ("loss", "target_loss", "loss_head_2", "grad_norm_target"):
        curves = [[entry[name] for entry in log if name in entry] for log in logs]
        assert len(curves[0]) == STEPS and curves[1] == pytest.approx(curves[0], rel=2e-3, abs=2e-5)
    assert (outputs[1] / "joint.done.json").exists()
