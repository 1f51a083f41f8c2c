"""The frozen target of a run."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from medusa_spec.errors import CheckpointError, ConfigError
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.target import Target, compute_device, compute_dtype
from medusa_spec.testing import save_tiny_model

MakeConfig = Callable[..., FinetuneConfig]


def test_every_end_of_sequence_is_known(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", dtype=torch.float32)
    own = Target(make_config(tmp_path, model=str(folder))).tokenizer.eos_token_id
    GenerationConfig(eos_token_id=[3, 5]).save_pretrained(folder)
    assert Target(make_config(tmp_path, model=str(folder))).eos_ids == {own, 3, 5}
    (folder / "generation_config.json").unlink()
    assert Target(make_config(tmp_path, model=str(folder))).eos_ids == {own}


def test_the_model_is_frozen_and_of_the_dtype_asked_for(make_config: MakeConfig, tmp_path: Path) -> None:
    target = Target(make_config(tmp_path, dtype="float64"))
    assert target.model.dtype == torch.float64 and not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())


@pytest.mark.parametrize("native", [False, True])
def test_auto_takes_bfloat16_only_where_it_is_not_emulated(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: native)
    config = make_config(tmp_path, dtype="auto", device="cpu")
    assert compute_dtype(config) == (torch.bfloat16 if native else torch.float32)


def test_a_released_model_can_be_attached_again(make_config: MakeConfig, tmp_path: Path) -> None:
    target = Target(make_config(tmp_path))
    first = target.backbone
    assert target.release() is first.model and not first.attached
    assert target.backbone is not first and target.backbone.attached


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there_is_named(make_config: MakeConfig, tmp_path: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"device must be .* got '{device}'"):
        compute_device(make_config(tmp_path, device=device))


@pytest.mark.parametrize("name", ["/no/such/folder", "no-such-model"])
def test_a_model_that_is_not_there_is_named(make_config: MakeConfig, tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"model must be .* got '{name}'"):
        _ = Target(make_config(tmp_path, model=name)).tokenizer
