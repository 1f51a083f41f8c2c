"""The adapter that heads need on their target: those that were trained with it (Medusa-2). Puts it in place."""

import hashlib
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

from medusa_spec.adapters import adapter_state
from medusa_spec.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG_NAME,
    TARGET_ADAPTER,
    heads_folder,
    read_config,
)
from medusa_spec.config import MedusaConfig
from medusa_spec.errors import CheckpointError
from medusa_spec.files import whole_file
from medusa_spec.head_adapters import is_adapter

MARK = "medusa_spec_adapter"
"""Attribute of a model that has one: the hash of its weights."""


def target_adapter(name_or_path: str | os.PathLike[str]) -> Path | None:
    """The folder of the adapter that heads need on their target; None if they need none.

    Args:
        name_or_path: Heads, or an adapter of heads: folder, packaged name or hub id.

    Raises:
        CheckpointError: If they need one that is not there, or is another one.
    """
    folder = heads_folder(name_or_path)
    if is_adapter(folder):
        folder = heads_folder(str(read_config(folder).base_heads))
    if not (folder / CONFIG_NAME).is_file():
        return None  # of another project
    wanted, found = read_config(folder).target_adapter_hash, folder / TARGET_ADAPTER
    if wanted is None:
        return None
    if not (found / ADAPTER_CONFIG).is_file() or adapter_hash(found) != wanted:
        raise CheckpointError(
            f"the heads in {folder} were trained with the adapter {wanted} on their target, which must be in "
            f"{found}; restore it"
        )
    return found


def adapter_hash(folder: Path) -> str:
    """Sixteen hex digits that name an adapter's weights."""
    try:
        return hashlib.sha256((folder / ADAPTER_WEIGHTS).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise CheckpointError(f"{folder / ADAPTER_WEIGHTS} cannot be read: {error}; restore the file") from error


def with_adapter(model: Any, folder: Path) -> Any:
    """A target with the adapter: merged into its weights for good, or, where they are quantised, around its layers.

    Args:
        model: The causal LM that the adapter is for, changed in place; not wrapped.
        folder: Of the adapter.
    """
    from peft import PeftModel

    adapted: Any = PeftModel.from_pretrained(model, str(folder))
    quantised = getattr(model, "hf_quantizer", None) is not None
    target = adapted.get_base_model() if quantised else adapted.merge_and_unload()
    setattr(target, MARK, adapter_hash(folder))
    return target.requires_grad_(False).eval()


def check_adapted(model: Any, config: MedusaConfig) -> None:
    """Warns where heads were trained with an adapter on their target, and this one has none."""
    wanted, found = config.target_adapter_hash, getattr(model, MARK, None)
    if wanted in (None, found) or (found is None and adapter_state(model)):  # one of the user's own is trusted
        return
    warnings.warn(
        f"these heads were trained together with an adapter on {config.base_model_name_or_path}, which this target "
        "has not. Output stays exactly this target's; acceptance will be lower. MedusaModel.from_pretrained(heads), "
        "without a model, loads the adapted one",
        stacklevel=4,
    )


def copy_adapter(folder: Path | None, destination: Path) -> None:
    """Copies an adapter into a folder of heads; each file is complete before it takes its name.

    Raises:
        CheckpointError: If it is not known where it is.
    """
    if folder is None:
        raise CheckpointError(
            "these heads belong to an adapter on their target, which was not loaded with them: copy their folder, or "
            "load it by MedusaModel.from_pretrained(heads)"
        )
    for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG):
        with whole_file(destination / TARGET_ADAPTER / name) as temporary:
            shutil.copyfile(folder / name, temporary)
