"""Adapters of heads are trained on stored states; the heads that they stand on stay as they are, bit for bit."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from medusa_spec import MedusaModel
from medusa_spec.adapters import adapted_layers
from medusa_spec.backbone import Backbone
from medusa_spec.checkpoint import ADAPTER_WEIGHTS, WEIGHTS_NAME, read_config
from medusa_spec.errors import CheckpointError, ConfigError
from medusa_spec.finetune import FinetuneConfig, run_pipeline
from medusa_spec.finetune.batches import PositionBatches
from medusa_spec.finetune.given_heads import own_folder
from medusa_spec.finetune.lora import adapt_heads, adapt_target, adapter_tensors, load_adapter_tensors
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.train import load_trained
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.heads import HeadsConfig, fitted_options, make_heads
from medusa_spec.testing import tiny, tiny_model

MakeConfig = Callable[..., FinetuneConfig]
FAMILIES: list[tuple[str, str, dict[str, Any]]] = [
    ("medusa", "shared", {}),
    ("medusa", "own", {}),
    ("hydra", "low_rank", {}),
    ("mlp_speculator", "shared", {}),
    ("recurrent", "shared", {}),
    ("eagle", "shared", {}),
    ("eagle3", "own", {"taps": "1"}),
    ("mtp", "shared", {}),
    ("fused", "shared", {"taps": "0,1"}),
]


@pytest.mark.parametrize(("kind", "lm_head", "options"), FAMILIES, ids=str)
def test_training_moves_the_adapter_alone_and_lowers_the_loss(kind: str, lm_head: Any, options: dict[str, Any]) -> None:
    backbone = Backbone(tiny_model(dtype=torch.float32))
    config = HeadsConfig(
        hidden_size=backbone.hidden_size,
        vocab_size=backbone.vocab_size,
        kind=kind,
        num_heads=2,
        lm_head=lm_head,
        rank=4,
        options=fitted_options(kind, options, backbone.config),
    )
    heads = make_heads(config, backbone.projection(), None, backbone.embedding())
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    base = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    adapt_heads(heads, rank=2, alpha=4.0, seed=0)
    before = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    model = TrainedHeads(heads, depth_decay=1.0)
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(2, 12, backbone.hidden_size, generator=generator)
    targets = torch.randint(0, 90, (2, 12, 3), generator=generator)
    layers = torch.randn(2, 12, len(heads.taps), h.shape[-1], generator=generator) if heads.taps else None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=0.02), []
    for _ in range(12):
        loss = model(h, targets, layers=layers)["loss"]
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in trained)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.98 * losses[0]
    moved = {name for name, tensor in heads.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == set(adapter_tensors(heads)) and len(moved) == len(trained)
    for name, tensor in base.items():  # every layer of the heads is as it was, and each linear one has an adapter
        kept = heads.state_dict().get(name, heads.state_dict().get(name.replace(".weight", ".base_layer.weight")))
        kept = heads.state_dict()[name.replace(".bias", ".base_layer.bias")] if kept is None else kept
        assert torch.equal(kept, tensor)


def test_an_adapter_is_a_function_of_its_seed_and_round_trips() -> None:
    backbone = Backbone(tiny_model(dtype=torch.float32))
    config = HeadsConfig(hidden_size=backbone.hidden_size, vocab_size=backbone.vocab_size, num_heads=2)
    made = [adapt_heads(make_heads(config, backbone.projection()), rank=3, alpha=6.0, seed=seed) for seed in (1, 1, 2)]
    first, same, other = (adapter_tensors(heads) for heads in made)
    assert all(torch.equal(tensor, same[name]) for name, tensor in first.items())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())
    load_adapter_tensors(made[2], first)
    assert all(torch.equal(tensor, first[name]) for name, tensor in adapter_tensors(made[2]).items())
    first.pop(next(iter(first)))
    with pytest.raises(CheckpointError, match=r"must hold 4 tensors, got 3: missing \['heads"):
        load_adapter_tensors(made[2], first)


@pytest.fixture(scope="module")
def adapted(finished: FinetuneConfig, tmp_path_factory: pytest.TempPathFactory) -> FinetuneConfig:
    """The settings of a run that trained an adapter on the heads of the finished run; nobody may change its folder."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    return run(finished, folder, adapter_rank=4, learning_rate=0.02, epochs=4)


def run(finished: FinetuneConfig, folder: Path, *, stages: Any = None, **changes: Any) -> FinetuneConfig:
    """On the states of the finished run."""
    folder.mkdir()
    for name in ("data*", "states*"):
        for path in Path(finished.output).glob(name):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
    given = str(Path(finished.output) / "heads")
    config = replace(finished, output=str(folder), **({"init_from": given} | changes))
    run_pipeline(config, stages=stages)
    return config


def test_a_domain_adapter_fits_its_data_better_than_its_base(adapted: FinetuneConfig) -> None:
    config = read_config(Path(adapted.output) / "heads")
    held_out = config.training["held_out"]
    assert held_out["top1"][0] > held_out["base_top1"][0]
    history = json.loads((Path(adapted.output) / "train" / "history.json").read_text())
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert config.base_heads == adapted.init_from and config.tree is not None and config.values is not None
    card = (Path(adapted.output) / "heads" / "README.md").read_text()
    assert "This is an adapter (LoRA) on the heads" in card and "without the adapter" in card
    assert "top-1 without the adapter" in (Path(adapted.output) / "report" / "report.md").read_text()


def test_its_folder_decodes_by_its_own_tree_and_says_what_the_target_says(adapted: FinetuneConfig) -> None:
    model = MedusaModel.from_pretrained(Path(adapted.output) / "heads", dtype=torch.float64)
    assert model.drafter.template == read_config(Path(adapted.output) / "heads").tree
    prompt = torch.randint(5, 90, (1, 9))
    expected = tiny_model().generate(prompt, do_sample=False, max_new_tokens=20)
    model.target.load_state_dict(tiny_model().state_dict())
    assert torch.equal(model.generate(prompt, do_sample=False, max_new_tokens=20), expected)


def test_a_killed_and_resumed_training_gives_the_same_adapter(
    adapted: FinetuneConfig, finished: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = PositionBatches.__getitem__

    def stop(self: PositionBatches, step: int) -> dict[str, torch.Tensor]:
        if step == 7:
            raise KeyboardInterrupt
        return read(self, step)

    monkeypatch.setattr(PositionBatches, "__getitem__", stop)
    settings: dict[str, Any] = {"adapter_rank": 4, "learning_rate": 0.02, "epochs": 4}
    with pytest.raises(KeyboardInterrupt):
        run(finished, tmp_path / "run", **settings)
    monkeypatch.setattr(PositionBatches, "__getitem__", read)
    assert (tmp_path / "run" / "train" / "checkpoint-4" / "complete").exists()
    run_pipeline(replace(adapted, output=str(tmp_path / "run")), stages=("train", "calibrate"))
    for name in ("train/" + WEIGHTS_NAME, "heads/" + ADAPTER_WEIGHTS):
        stored, again = (load_file(folder / name) for folder in (Path(adapted.output), tmp_path / "run"))
        assert stored.keys() == again.keys()
        for key, tensor in stored.items():
            assert key.endswith("calibration.text") or torch.equal(tensor, again[key])


def test_trained_adapters_are_read_on_the_heads_that_they_stand_on(adapted: FinetuneConfig) -> None:
    heads = load_trained(adapted, Target(adapted).backbone)
    stored = load_file(Path(adapted.output) / "train" / WEIGHTS_NAME)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in adapter_tensors(heads).items())
    base = load_file(Path(str(adapted.init_from)) / WEIGHTS_NAME)
    weight = heads.heads[0].blocks[0].linear.base_layer.weight
    assert torch.equal(weight, base["heads.0.blocks.0.linear.weight"].float())


def test_an_adapter_is_not_what_another_training_begins_with(adapted: FinetuneConfig) -> None:
    with pytest.raises(ConfigError, match=r"init_from must be heads, got .*which is an adapter; begin with the heads"):
        own_folder(str(Path(adapted.output) / "heads"))


def test_settings_that_cannot_be_are_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapter_rank must be None without init_from, got 4"):
        make_config(tmp_path, adapter_rank=4)
    with pytest.raises(ConfigError, match="adapter_rank must be an integer of 1 or more, or None, got 0"):
        make_config(tmp_path, adapter_rank=0, init_from="x")
    with pytest.raises(ConfigError, match="adapter_alpha must be above 0, and None without adapter_rank, got 2.0"):
        make_config(tmp_path, adapter_alpha=2.0)
    assert make_config(tmp_path, adapter_rank=4, init_from="x").used_adapter_alpha == 8.0
    assert make_config(tmp_path, adapter_rank=4, init_from="x", adapter_alpha=1.0).used_adapter_alpha == 1.0


def test_what_a_text_does_not_pass_through_gets_no_adapter() -> None:
    """A tower for pictures: nothing there could learn."""
    model: Any = tiny("llama")
    everywhere = {name for name, _ in adapted_layers(adapt_target(tiny("llama"), rank=2, alpha=1.0, seed=0))}
    model.tower = nn.Linear(4, 4)
    found = {name for name, _ in adapted_layers(adapt_target(model, rank=2, alpha=1.0, seed=0))}
    assert found == everywhere and len(found) > 6
