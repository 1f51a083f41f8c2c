"""The adapter that heads need on their target: found by their folder, known by its hash, merged where it can be."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from medusa_spec import MedusaModel
from medusa_spec.adapters import adapted_layers
from medusa_spec.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS, packaged_heads, save_heads
from medusa_spec.config import MedusaConfig
from medusa_spec.errors import CheckpointError
from medusa_spec.head_adapters import save_adapter
from medusa_spec.heads_note import weights_hash
from medusa_spec.target_adapter import (
    MARK,
    adapter_hash,
    check_adapted,
    copy_adapter,
    target_adapter,
    with_adapter,
)
from medusa_spec.testing import save_tiny_model, tiny_model


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """One of the tiny model, as PEFT saves it."""
    peft = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    peft.save_pretrained(tmp_path / "lora", save_embedding_layers=False)
    return tmp_path / "lora"


@pytest.fixture
def heads(adapter: Path, tmp_path: Path) -> Path:
    """Heads that were trained with it."""
    base = str(save_tiny_model(tmp_path / "model"))
    model = MedusaModel.from_pretrained(base)
    copy_adapter(adapter, tmp_path / "heads")
    save_heads(tmp_path / "heads", model.heads, replace(model.medusa_config, target_adapter_hash=adapter_hash(adapter)))
    return tmp_path / "heads"


def test_it_is_found_beside_the_heads_and_below_adapters_of_theirs(heads: Path, tmp_path: Path) -> None:
    assert target_adapter(heads) == heads / "adapter"
    model = MedusaModel.from_pretrained(heads)
    get_peft_model(model.heads, LoraConfig(r=2, target_modules=["linear"], init_lora_weights=False))
    config = replace(model.medusa_config, base_heads=str(heads), base_heads_hash=weights_hash(model.heads))
    save_adapter(tmp_path / "domain", model.heads, replace(config, target_adapter_hash=None))
    assert target_adapter(tmp_path / "domain") == heads / "adapter"
    again = MedusaModel.from_pretrained(tmp_path / "domain")
    assert again.active_adapters() == ["default"] and again.exact_to == model.exact_to


def test_heads_of_a_target_as_it_is_need_none() -> None:
    assert all(target_adapter(name) is None for name in packaged_heads())


def test_another_one_or_none_in_its_place_is_an_error(heads: Path) -> None:
    weights = heads / "adapter" / ADAPTER_WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"were trained with the adapter \w{16} on their target, which must be"):
        MedusaModel.from_pretrained(heads)
    (heads / "adapter" / ADAPTER_CONFIG).unlink()
    with pytest.raises(CheckpointError, match="restore it"):
        target_adapter(heads)
    weights.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        adapter_hash(heads / "adapter")


def test_it_is_merged_into_plain_layers_that_compute_what_the_adapted_ones_do(adapter: Path) -> None:
    from peft import PeftModel

    ids, plain = torch.arange(5, 20)[None], tiny_model()
    expected = PeftModel.from_pretrained(tiny_model(), adapter).eval()(input_ids=ids).logits
    merged = with_adapter(tiny_model(), adapter)
    assert not adapted_layers(merged) and getattr(merged, MARK) == adapter_hash(adapter)
    assert not any(parameter.requires_grad for parameter in merged.parameters())
    torch.testing.assert_close(merged(ids).logits, expected)
    assert not torch.allclose(merged(ids).logits, plain(ids).logits)


def test_a_target_without_it_is_told_of_once_it_is_known(heads: Path, adapter: Path) -> None:
    config = MedusaConfig.from_text((heads / "medusa_config.json").read_text())
    with pytest.warns(UserWarning, match=r"which this target has not\. Output stays exactly this target's"):
        check_adapted(tiny_model(), config)
    check_adapted(with_adapter(tiny_model(), adapter), config)  # no warning: an error here
    check_adapted(get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"])).get_base_model(), config)
    check_adapted(tiny_model(), replace(config, target_adapter_hash=None))


def test_an_adapter_that_was_never_loaded_cannot_be_copied(heads: Path, tmp_path: Path) -> None:
    model: Any = MedusaModel.from_pretrained(heads)
    model.target_adapter = None
    with pytest.raises(CheckpointError, match="which was not loaded with them: copy their folder"):
        model.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again").exists()
