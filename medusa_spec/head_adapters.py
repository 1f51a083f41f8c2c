"""Adapters of trained heads, many for one base, in PEFT's format: loaded, swapped, unloaded, saved. Trains nothing."""

import copy
import os
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from medusa_spec.adapters import active_adapters, adapted_layers
from medusa_spec.backbone import Backbone
from medusa_spec.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CARD_NAME,
    CONFIG_NAME,
    heads_folder,
    load_heads,
    read_config,
    read_weights,
)
from medusa_spec.config import MedusaConfig
from medusa_spec.errors import CheckpointError, ConfigError
from medusa_spec.files import read_json, write_json, write_tensors, write_text
from medusa_spec.heads import DraftHeads
from medusa_spec.heads.note import note_tensor
from medusa_spec.heads_note import NOTE, note_of, weights_hash

PREFIX = "base_model.model."
"""Of all names in PEFT's files."""


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of heads (one of a model has no `medusa_config.json`)."""
    return (folder / CONFIG_NAME).is_file() and (folder / ADAPTER_CONFIG).is_file()


def load_with_adapter(
    name_or_path: str | os.PathLike[str], backbone: Backbone, **options: Any
) -> tuple[DraftHeads, Any]:
    """Heads as `load_heads` does; of an adapter those that it stands on, with the adapter in place and active.

    Args:
        name_or_path: As for `load_heads`, or an adapter of heads.
        backbone: The target.
        **options: For `load_heads`.

    Returns:
        The heads, and the config of those without the adapter.

    Raises:
        CheckpointError: As for `load_heads` and `load_adapter`, or if the heads that an adapter stands on are not here.
    """
    folder = heads_folder(name_or_path)
    if not is_adapter(folder):
        return load_heads(name_or_path, backbone, **options)
    base = read_config(folder).base_heads
    try:
        heads, config = load_heads(str(base), backbone, **options)
    except CheckpointError as error:
        raise CheckpointError(
            f"the adapter in {folder} stands on the heads {base!r}, which cannot be loaded: {error}; where they are "
            "elsewhere, load them, and then the adapter: MedusaModel.from_pretrained(target, heads=...).load_adapter()"
        ) from error
    load_adapter(heads, folder, "default")
    return heads, config


def load_adapter(heads: DraftHeads, folder: Path, name: str) -> None:
    """Puts an adapter in place beside those that are there, active and frozen.

    Args:
        heads: Those that it was trained on.
        folder: Of the adapter.
        name: By which it is swapped; what PEFT calls `adapter_name`.

    Raises:
        CheckpointError: If it is for heads of another shape, damaged, or one of a target.
        ConfigError: If there is one of that name.
    """
    from peft import PeftConfig
    from peft.functional import cast_adapter_dtype, inject_adapter_in_model, set_peft_model_state_dict

    if not is_adapter(folder):
        raise CheckpointError(
            f"adapter must be a folder of an adapter of heads, with {CONFIG_NAME} and {ADAPTER_CONFIG}, got {folder}; "
            "an adapter of the target is loaded before the target is wrapped: MedusaModel(peft_model, heads)"
        )
    if name in names(heads):
        raise ConfigError(f"adapter_name must be a new one, got {name!r}, which is loaded; delete_adapter() it first")
    _check_base(heads, folder)
    state = {key.removeprefix(PREFIX): tensor for key, tensor in read_weights(folder / ADAPTER_WEIGHTS).items()}
    before, was_active = names(heads), active_adapters(heads)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several are what is wanted
            inject_adapter_in_model(PeftConfig.from_pretrained(str(folder)), heads, adapter_name=name)
        cast_adapter_dtype(heads, name)  # before its weights come, which are not to be rounded to those of the heads
        result: Any = set_peft_model_state_dict(heads, state, adapter_name=name)
    except Exception as error:  # PEFT's own, of many types
        _take_back(heads, name, before, was_active)
        raise CheckpointError(f"the adapter in {folder} does not fit these heads: {error}") from error
    missing = [key for key in result.missing_keys if f".{name}." in key]
    if missing or result.unexpected_keys:
        _take_back(heads, name, before, was_active)
        raise CheckpointError(
            f"{folder / ADAPTER_WEIGHTS} must hold what {ADAPTER_CONFIG} says: missing {missing}, surplus "
            f"{result.unexpected_keys}; restore the folder or train the adapter again"
        )
    activate(heads, name)


def save_adapter(
    folder: str | os.PathLike[str],
    heads: DraftHeads,
    config: MedusaConfig,
    model_card: str | None = None,
    *,
    name: str = "default",
) -> None:
    """Writes an adapter as PEFT does, with its note; each file is complete before it takes its name, the config last.

    Args:
        folder: Made if missing; other files in it are left alone.
        heads: The adapter stands in them.
        config: Its own calibration and record; `base_heads` names what it stands on.
        model_card: Text of the README.md; None leaves the one that is there.
        name: Of the adapter.

    Raises:
        CheckpointError: If a tensor is empty or not finite (nothing is written then).
    """
    from peft.functional import get_peft_model_state_dict

    folder = Path(folder)
    peft_config = copy.deepcopy(_configs(heads)[name])
    peft_config.base_model_name_or_path, peft_config.inference_mode = config.base_heads, True
    peft_config.modules_to_save = [NOTE]
    state = get_peft_model_state_dict(heads, adapter_name=name, save_embedding_layers=False)
    state = {PREFIX + key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}
    for key, tensor in state.items():
        if tensor.numel() == 0 or (tensor.is_floating_point() and not tensor.isfinite().all()):
            raise CheckpointError(f"tensor {key} is empty or not finite; the adapter was not saved")
    state[f"{PREFIX}{NOTE}.text"] = note_tensor(config.to_text().encode())
    with tempfile.TemporaryDirectory() as scratch:
        peft_config.save_pretrained(scratch)
        described = read_json(Path(scratch) / ADAPTER_CONFIG)
    write_tensors(folder / ADAPTER_WEIGHTS, state, metadata={"format": "pt"})
    write_json(folder / ADAPTER_CONFIG, described)
    if model_card is not None:
        write_text(folder / CARD_NAME, model_card)
    write_text(folder / CONFIG_NAME, config.to_text())


def save_active(folder: str | os.PathLike[str], heads: DraftHeads, config: MedusaConfig) -> bool:
    """Saves the active adapter, by the note that it brought, or of one without any by the config of its heads.

    Returns:
        Whether there is one; heads whose adapters are disabled are refused.

    Raises:
        ConfigError: If adapters are loaded, and not one of them is active.
    """
    if not names(heads):
        return False
    found = active_adapters(heads)
    if len(found) != 1:
        raise ConfigError(
            f"one adapter must be active to be saved, got {found} of {names(heads)}; set_adapter() one, or "
            "delete_adapter() all to save the heads"
        )
    save_adapter(folder, heads, note_of(heads) or _bare_config(heads, config), name=found[0])
    return True


def _bare_config(heads: DraftHeads, config: MedusaConfig) -> MedusaConfig:
    """What is known of an adapter that somebody trained with PEFT alone."""
    base = _configs(heads)[active_adapters(heads)[0]].base_model_name_or_path
    return replace(config, training={}, base_heads=base, base_heads_hash=weights_hash(heads))


def names(heads: DraftHeads) -> list[str]:
    """Adapters that are loaded, in that order."""
    return list(_configs(heads))


def activate(heads: DraftHeads, name: str) -> None:
    """Lets guesses be made with one adapter.

    Raises:
        ConfigError: If it is not loaded.
    """
    from peft.functional import set_adapter

    _check_loaded(heads, name)
    enable(heads, True)
    set_adapter(heads, name, inference_mode=True)


def enable(heads: DraftHeads, enabled: bool) -> None:
    """Lets guesses be made with the active adapter, or without any; all stay loaded."""
    for _, module in _adapted(heads):
        module.enable_adapters(enabled)
    heads.requires_grad_(False)


def delete(heads: DraftHeads, name: str) -> None:
    """Unloads an adapter; with the last one the layers are plain ones again.

    Raises:
        ConfigError: If it is not loaded.
    """
    from peft.functional import delete_adapter
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    _check_loaded(heads, name)
    configs = _configs(heads)
    delete_adapter(heads, adapter_name=name, prefix=PEFT_TYPE_TO_PREFIX_MAPPING[configs[name].peft_type])
    configs.pop(name, None)
    if not configs:
        _restore(heads)


def _configs(heads: DraftHeads) -> dict[str, Any]:
    """PEFT's own record of what it put in place, by name."""
    found: Any = getattr(heads, "peft_config", {})
    return found


def _adapted(heads: DraftHeads) -> list[tuple[str, Any]]:
    """What adapters put in the place of modules: layers, and the holder of their notes."""
    found = adapted_layers(heads)
    if hasattr(heads.calibration, "modules_to_save"):
        found.append((NOTE, heads.calibration))
    return found


def _restore(heads: DraftHeads) -> None:
    for name, module in _adapted(heads):
        above, _, last = name.rpartition(".")
        plain = module.original_module if name == NOTE else module.get_base_layer()
        setattr(heads.get_submodule(above), last, plain)
    del heads.peft_config


def _take_back(heads: DraftHeads, name: str, before: list[str], was_active: list[str]) -> None:
    """As it was before an adapter that cannot be had."""
    if name not in names(heads) or name in before:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Adapter .* was active which is now deleted")
        delete(heads, name)
    if len(was_active) == 1:
        activate(heads, was_active[0])


def _check_loaded(heads: DraftHeads, name: str) -> None:
    if name not in names(heads):
        raise ConfigError(f"adapter_name must be one of those loaded, {names(heads)}, got {name!r}")


def _check_base(heads: DraftHeads, folder: Path) -> None:
    config = read_config(folder)
    if config.heads != heads.config:
        raise CheckpointError(
            f"the adapter in {folder} is for the heads {config.base_heads!r}, {config.heads}, got {heads.config}; load "
            "those heads"
        )
    if config.base_heads_hash not in (None, weights_hash(heads)):
        warnings.warn(
            f"the adapter in {folder} was trained on other weights of the heads {config.base_heads!r} than these. "
            "Output stays exactly the target's; acceptance may be lower: train the adapter on these heads if it is",
            stacklevel=3,
        )
