"""Trained heads to go on from: where they are, of what shape, and whether they loaded as they are on disk."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from medusa_spec.backbone import Backbone
from medusa_spec.checkpoint import CONFIG_NAME, WEIGHTS_NAME, heads_folder, load_heads, read_config
from medusa_spec.errors import CheckpointError, ConfigError
from medusa_spec.head_adapters import is_adapter
from medusa_spec.heads import DraftHeads, HeadsConfig, make_heads, options_of, parse_options
from medusa_spec.target_adapter import target_adapter

SHAPE = ("kind", "num_heads", "num_layers", "lm_head")
"""Settings that are those of the heads, whatever the run; `rank` and the family's options, too."""


def own_folder(name: str) -> Path:
    """The folder of heads to start from.

    Raises:
        ConfigError: If they are in another project's format, or an adapter of heads.
    """
    folder = heads_folder(name)
    if is_adapter(folder):
        raise ConfigError(
            f"init_from must be heads, got {name!r}, which is an adapter; begin with the heads that it stands on, "
            f"{read_config(folder).base_heads!r}"
        )
    if (folder / CONFIG_NAME).is_file() and target_adapter(name) is not None:
        raise ConfigError(
            f"init_from must be heads of the target as it is, got {name!r}, which were trained with an adapter on it; "
            "save the adapted model and give it as model: MedusaModel.from_pretrained(heads).detach().save_pretrained()"
        )
    if not (folder / CONFIG_NAME).is_file():
        raise ConfigError(
            f"init_from must be heads in this library's own format, got {name!r}, which is of another project; convert "
            f"them once: MedusaModel.from_pretrained(target, heads={name!r}).save_pretrained(folder)"
        )
    return folder


def shaped_as_given(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run, and where they name heads to start from and say nothing of their shape, that of these heads.

    Args:
        settings: Fields of `FinetuneConfig`, those that were given.

    Raises:
        ConfigError: If heads of this library do not lie there, or the settings say otherwise: better now than after
            the data have been read.
    """
    if settings.get("init_from") is None:
        return settings
    heads = read_config(own_folder(settings["init_from"])).heads
    for key in (*SHAPE, "draft_vocab_size"):
        if key in settings and settings[key] != getattr(heads, key):
            raise _refused(key, settings["init_from"], getattr(heads, key), settings[key])
    said = settings.get("options", {})
    try:
        options = dict(heads.options) | (said if isinstance(said, dict) else parse_options(said))
        same = options_of(heads.kind, options) == options_of(heads.kind, heads.options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not same:
        raise _refused("options", settings["init_from"], heads.options, said)
    shape = {name: getattr(heads, name) for name in (*SHAPE, "rank", "draft_vocab_size")}
    return shape | settings | {"options": options}


def check_shape(ours: HeadsConfig, theirs: HeadsConfig, name: str) -> None:
    """Compares what the settings say with what the heads are.

    Args:
        ours: Of the settings.
        theirs: Of the heads.
        name: Where these are.

    Raises:
        ConfigError: If they differ, naming what.
    """
    for key in (*SHAPE, *(["rank"] if ours.lm_head == "low_rank" else [])):
        if getattr(ours, key) != getattr(theirs, key):
            raise _refused(key, name, getattr(theirs, key), getattr(ours, key))
    options, expected = (options_of(config.kind, config.options) for config in (ours, theirs))
    if options != expected:
        raise _refused("options", name, expected, options)


def _refused(key: str, name: str, expected: Any, got: Any) -> ConfigError:
    return ConfigError(f"{key} must be that of init_from = {name!r}, which is {expected!r}, got {got!r}")


def given_heads(name: str, sizes: HeadsConfig, backbone: Backbone) -> DraftHeads:
    """The heads of `init_from`, in float32, to be trained on.

    Args:
        name: Folder, packaged name or hub id.
        sizes: What the settings say of them, which must be theirs.
        backbone: The target.

    Raises:
        ConfigError: If they are of another kind or shape, or not this library's own.
        CheckpointError: If they did not load as they are on disk, or are not trained.
    """
    folder = own_folder(name)
    heads, _ = load_heads(folder, backbone, dtype=torch.float32)
    check_shape(sizes, heads.config, name)
    check_loaded(heads, load_file(folder / WEIGHTS_NAME), name)
    for parameter in heads.parameters():
        parameter.requires_grad_(True)
    return heads.train()


def check_loaded(heads: DraftHeads, stored: dict[str, torch.Tensor], name: str) -> None:
    """Compares norms with those on disk: training on from heads must not silently begin with fresh ones.

    Raises:
        CheckpointError: If a norm differs, or all that heads of this family begin with at zero is zero still.
    """
    for key, tensor in heads.state_dict().items():
        expected, got = float(stored[key].float().norm()), float(tensor.float().norm())
        if abs(expected - got) > 1e-3 * max(expected, 1e-6):
            raise CheckpointError(f"{key} of {name!r} must have norm {expected:.6g} as on disk, got {got:.6g}")
    fresh = make_heads(heads.config, heads.projection, heads.draft_ids, heads.embedding)
    begun = [key for key, parameter in fresh.named_parameters() if not parameter.any()]
    if begun and not any(stored[key].any() for key in begun):
        raise CheckpointError(
            f"init_from must name trained heads, but {name!r} is as heads begin: {', '.join(begun[:3])} … are zero"
        )
