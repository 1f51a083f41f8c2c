"""The name of a target's weights."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from medusa_spec.errors import CheckpointError
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.weights import weights_name
from medusa_spec.testing import save_tiny_model

MakeConfig = Callable[..., FinetuneConfig]


@pytest.fixture
def config(make_config: MakeConfig, tiny_folder: Path, tmp_path: Path) -> FinetuneConfig:
    """A run on a copy of the tiny model."""
    shutil.copytree(tiny_folder, tmp_path / "model")
    return make_config(tmp_path / "run", model=str(tmp_path / "model"))


def test_a_copy_has_the_same_name_and_so_has_one_in_other_shards(
    config: FinetuneConfig, make_config: MakeConfig, tiny_folder: Path, tmp_path: Path
) -> None:
    name = weights_name(config)
    assert name == weights_name(make_config(tmp_path, model=str(tiny_folder)))
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype="auto")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert weights_name(replace(config, model=str(tmp_path / "shards"))) == name


@pytest.mark.parametrize("seed", range(4))
def test_any_trained_tensor_gives_another_name(config: FinetuneConfig, seed: int) -> None:
    name = weights_name(config)
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype="auto")
    parameters = [parameter for parameter in model.parameters()]
    with torch.no_grad():
        parameters[seed * (len(parameters) - 1) // 3].mul_(1.01)
    model.save_pretrained(config.model)
    assert weights_name(config) != name


def test_another_dtype_is_another_name(config: FinetuneConfig) -> None:
    name = weights_name(config)
    save_tiny_model(config.model, dtype=torch.bfloat16)
    assert weights_name(config) != name


def test_files_of_another_format_are_told_apart_by_their_bytes(config: FinetuneConfig) -> None:
    folder = Path(config.model)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert weights_name(config) is None
    (folder / "pytorch_model.bin").write_bytes(bytes(100_000))
    name = weights_name(config)
    (folder / "pytorch_model.bin").write_bytes(bytes(99_999) + b"\1")
    assert None is not name != weights_name(config)


def test_a_damaged_file_is_named(config: FinetuneConfig) -> None:
    path = next(Path(config.model).glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CheckpointError, match=f"{path.name} cannot be read"):
        weights_name(config)


def test_a_model_of_the_hub_is_named_by_its_commit(config: FinetuneConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        _commit_hash = "abc"

    monkeypatch.setattr("medusa_spec.finetune.weights.AutoConfig.from_pretrained", lambda *a, **k: Found())
    assert weights_name(replace(config, model="org/model")) == "commit:abc"
