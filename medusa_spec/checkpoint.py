"""Heads on disk: a folder with config, tensors and model card, written whole or not at all. Knows no decoding.

Other projects' checkpoints are read, too: see `formats/`.
"""

import json
import os
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.utils import cached_file

from medusa_spec.backbone import Backbone
from medusa_spec.config import MedusaConfig
from medusa_spec.errors import CheckpointError
from medusa_spec.files import read_json, write_tensors, write_text
from medusa_spec.formats import CONFIG_FILE, fetch, foreign_target, has_tensors, read_foreign, speaks_of_heads
from medusa_spec.heads import DraftHeads, make_heads

CONFIG_NAME = "medusa_config.json"
WEIGHTS_NAME = "heads.safetensors"
CARD_NAME = "README.md"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
TARGET_ADAPTER = "adapter"
"""Folder of the adapter that the target of these heads has, below theirs."""
OWN_FILES = [
    CONFIG_NAME,
    WEIGHTS_NAME,
    CARD_NAME,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    f"{TARGET_ADAPTER}/{ADAPTER_CONFIG}",
    f"{TARGET_ADAPTER}/{ADAPTER_WEIGHTS}",
]
"""What a folder of ours may hold: heads, with an adapter of their target, or an adapter of heads."""
PACKAGED = Path(__file__).parent / "data" / "heads"


def packaged_heads() -> list[str]:
    """Names of the heads that come with the library."""
    return sorted(path.name for path in PACKAGED.iterdir()) if PACKAGED.is_dir() else []


def heads_folder(name_or_path: str | os.PathLike[str]) -> Path:
    """The folder of heads given by path, by name of packaged heads, or by hub id (which is downloaded).

    It may be a checkpoint of another project.

    Raises:
        CheckpointError: If there is none; the message lists the names that exist.
    """
    path = Path(name_or_path)
    if (path / CONFIG_NAME).is_file():
        return path
    if str(name_or_path) in packaged_heads():
        return PACKAGED / str(name_or_path)
    if has_tensors(path):
        return path
    if path.exists():
        raise CheckpointError(
            f"heads must be a folder with a {CONFIG_NAME}, or with the tensors of another project's heads, got {path}, "
            f"which {'has neither' if path.is_dir() else 'is a file: give its folder'}"
        )
    try:
        return fetch(str(name_or_path), OWN_FILES, own_config=CONFIG_NAME)
    except Exception as error:
        raise CheckpointError(
            f"heads must be a folder, a hub id or one of {packaged_heads()}, got {str(name_or_path)!r}: {error}"
        ) from error


def names_heads(name_or_path: str | os.PathLike[str]) -> bool:
    """Whether a folder, packaged name or hub id is one of heads (or of a model with heads) rather than of a model."""
    path = Path(name_or_path)
    if (path / CONFIG_NAME).is_file() or str(name_or_path) in packaged_heads():
        return True
    if path.exists():
        config = path / CONFIG_FILE
        return config.is_file() and speaks_of_heads(read_json(config))
    if _cached(name_or_path, CONFIG_NAME) is not None:
        return True
    found = _cached(name_or_path, CONFIG_FILE)
    return found is not None and speaks_of_heads(read_json(Path(found)))


def _cached(repository: str | os.PathLike[str], file: str) -> str | None:
    """A file of a hub repository, here; None if it has no such file, or there is no such repository."""
    try:
        return cached_file(
            str(repository),
            file,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:  # no such repository, or what cannot be the name of one
        return None


def target_of(name_or_path: str | os.PathLike[str], folder: Path) -> tuple[str, str | None]:
    """Name and revision of the target that heads are for.

    Args:
        name_or_path: The heads, as the user names them.
        folder: Their folder, see `heads_folder`.

    Raises:
        CheckpointError: If they do not say.
    """
    revision = None
    if (folder / CONFIG_NAME).is_file():
        config = read_config(folder)
        name, revision = config.base_model_name_or_path, config.base_revision
    else:
        name, with_target = foreign_target(folder)
        name = str(name_or_path) if with_target else name
    if name is None:
        raise CheckpointError(
            f"the heads in {folder} do not name their target; pass it: MedusaModel.from_pretrained(target, heads=...)"
        )
    return name, revision


def read_config(folder: str | os.PathLike[str]) -> MedusaConfig:
    """The config of a folder of heads.

    Raises:
        CheckpointError: If it is missing, is not JSON, or does not say what it must.
    """
    path = Path(folder) / CONFIG_NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; restore the folder or train the heads again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return MedusaConfig.from_dict(values)


def save_heads(
    folder: str | os.PathLike[str],
    heads: DraftHeads,
    config: MedusaConfig,
    model_card: str | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Writes a folder of heads; each file is complete before it takes its name, the config last.

    Args:
        folder: Made if missing; other files in it are left alone.
        heads: Heads to save.
        config: Its `heads` must be those of `heads`.
        model_card: Text of the README.md; None leaves the one that is there.
        dtype: Stored dtype of the weights.

    Raises:
        CheckpointError: If a tensor is empty or not finite (nothing is written then).
    """
    folder = Path(folder)
    if config.heads != heads.config:
        raise CheckpointError(f"config.heads must be that of the heads, {heads.config}, got {config.heads}")
    state = {
        name: (tensor if name == "draft_ids" else tensor.to(dtype)).detach().cpu().contiguous()
        for name, tensor in heads.state_dict().items()
    }
    for name, tensor in state.items():
        if tensor.numel() == 0 or (tensor.is_floating_point() and not tensor.isfinite().all()):
            raise CheckpointError(f"tensor {name} is empty or not finite; the heads were not saved")
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS_NAME, state, metadata={"format": "pt"})
    if model_card is not None:
        write_text(folder / CARD_NAME, model_card)
    write_text(folder / CONFIG_NAME, config.to_text())


def load_heads(
    name_or_path: str | os.PathLike[str],
    backbone: Backbone,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> tuple[DraftHeads, MedusaConfig]:
    """Loads heads for a target, strictly.

    Args:
        name_or_path: Folder, packaged name or hub id; of this library or of another project, see docs/formats.md.
        backbone: The target.
        dtype: Of the loaded heads; None takes the target's.
        device: None takes the target's.

    Returns:
        The heads, frozen, and their config.

    Raises:
        CheckpointError: If sizes differ from the target's, tensors are missing, surplus, of wrong shape or unreadable.
        UnsupportedError: If they are of another project and of a kind that is not read, naming it.
    """
    folder = heads_folder(name_or_path)
    foreign = not (folder / CONFIG_NAME).is_file()
    config, state = read_foreign(folder, backbone) if foreign else _read_own(folder, backbone)
    draft_ids = state.get("draft_ids")
    dtype, device = dtype or backbone.dtype, device or backbone.head_device
    try:
        embedding = backbone.embedding()
        heads = make_heads(config.heads, backbone.projection().rows(draft_ids), draft_ids, embedding)
    except ValueError as error:
        raise CheckpointError(f"{folder / WEIGHTS_NAME} does not fit {CONFIG_NAME}: {error}") from error
    _check_tensors(folder, heads.state_dict(), state)
    heads.to(device=device, dtype=dtype).load_state_dict(state)
    heads.projection = heads.projection.to(dtype)
    if heads.embedding is not None:
        heads.embedding = heads.embedding.to(dtype, device)
    if config.lm_head_hash is not None and config.lm_head_hash != backbone.lm_head_hash():
        warnings.warn(
            f"the heads in {folder} were trained on {config.base_model_name_or_path} with another LM head than this "
            "target's. Output stays exactly the target's; acceptance may be lower: fine-tune the heads on this target "
            "if it is",
            stacklevel=2,
        )
    return heads.requires_grad_(False).eval(), config


def _read_own(folder: Path, backbone: Backbone) -> tuple[MedusaConfig, dict[str, torch.Tensor]]:
    config = read_config(folder)
    for name, own in (("hidden_size", backbone.hidden_size), ("vocab_size", backbone.vocab_size)):
        saved = getattr(config.heads, name)
        if saved != own:
            raise CheckpointError(
                f"the heads in {folder} have {name} {saved}, the target has {own}: they were trained for another "
                f"model ({config.base_model_name_or_path}); use heads of this model"
            )
    state = read_weights(folder / WEIGHTS_NAME)
    _check_draft_ids(folder, state.get("draft_ids"), config.heads.draft_vocab_size, backbone.vocab_size)
    return config, state


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file.

    Raises:
        CheckpointError: If it is missing or damaged.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; restore the file or train the heads again") from error


def _check_draft_ids(folder: Path, ids: torch.Tensor | None, size: int | None, vocab_size: int) -> None:
    path = folder / WEIGHTS_NAME
    if (ids is None) != (size is None):
        raise CheckpointError(
            f"{path} must hold draft_ids if, and only if, {CONFIG_NAME} has a draft_vocab_size: it is {size}, and "
            f"draft_ids are {'missing' if ids is None else 'there'}"
        )
    if ids is None:
        return
    if ids.shape != (size,) or ids.dtype != torch.long or ids.min() < 0 or ids.max() >= vocab_size:
        raise CheckpointError(
            f"{path}: draft_ids must be {size} int64 ids in 0..{vocab_size - 1}, got shape {tuple(ids.shape)} of "
            f"{ids.dtype}{f' in {int(ids.min())}..{int(ids.max())}' if ids.numel() else ''}; the file is damaged"
        )
    if not (ids.diff() > 0).all():
        raise CheckpointError(f"{path}: draft_ids must rise, each id once; the file is damaged")


def _check_tensors(folder: Path, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    missing, surplus = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or surplus:
        raise CheckpointError(
            f"{folder / WEIGHTS_NAME} must hold {len(expected)} tensors, got {len(found)}: missing {missing}, "
            f"surplus {surplus}; it does not belong to this {CONFIG_NAME}"
        )
    for name, tensor in expected.items():
        if tensor.shape != found[name].shape:
            raise CheckpointError(
                f"{folder / WEIGHTS_NAME}: {name} must have shape {tuple(tensor.shape)}, got {tuple(found[name].shape)}"
            )
        if not found[name].isfinite().all():
            raise CheckpointError(f"{folder / WEIGHTS_NAME}: {name} is not finite; restore the file or train again")
