"""What a folder of a foreign checkpoint holds: names of tensors, read on demand, and its config. Knows no format."""

import json
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from medusa_spec.errors import CheckpointError
from medusa_spec.files import read_json

CONFIG_FILE = "config.json"
PICKLES = (".pt", ".bin")
NO_WEIGHTS = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "training_args.bin")
"""What trainers leave beside weights."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Contents:
    """A folder's tensors by name, none read yet.

    Attributes:
        folder: Where they are.
        files: The files that hold each tensor; more than one is an error once that tensor is wanted.
        config: `config.json`, empty if there is none.
    """

    folder: Path
    files: dict[str, list[Path]]
    config: dict[str, Any]

    def names_beside(self, pattern: re.Pattern[str]) -> list[str]:
        """All names in the files that hold a tensor of this name: other files are not this format's business."""
        files = {file for name, found in self.files.items() if pattern.fullmatch(name) for file in found}
        return [name for name, found in self.files.items() if files & set(found)]

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors by name, each file opened once.

        Raises:
            CheckpointError: If two files hold one of them, or a file is missing or damaged.
        """
        wanted: dict[Path, list[str]] = {}
        for name in dict.fromkeys(names):
            if len(self.files[name]) > 1:
                found = ", ".join(sorted(file.name for file in self.files[name]))
                raise CheckpointError(
                    f"{self.folder} must hold {name} once, got {len(self.files[name])}: in {found}; leave only the "
                    "file that is meant (shards of tensor parallelism are not joined)"
                )
            wanted.setdefault(self.files[name][0], []).append(name)
        return {name: tensor for file, here in wanted.items() for name, tensor in _read(file, here).items()}


def tensor_files(folder: Path) -> list[Path]:
    """Files that may hold weights, safetensors first."""
    found = sorted(path for path in folder.glob("*") if path.is_file() and path.name not in NO_WEIGHTS)
    pickles = [path for path in found if path.suffix in PICKLES]
    return [path for path in found if path.suffix == ".safetensors"] + pickles


def has_tensors(folder: Path) -> bool:
    """Whether a folder holds weights of any kind."""
    return folder.is_dir() and bool(tensor_files(folder) or list(folder.glob("*.index.json")))


def read_contents(folder: Path) -> Contents:
    """Names and config of a folder. Where an index names the shards, only those that are wanted will be opened.

    Raises:
        CheckpointError: If a file is damaged, or holds more than tensors.
    """
    files: dict[str, list[Path]] = {}
    listed: set[Path] = set()
    for index in sorted(folder.glob("*.index.json")):
        for name, file in weight_map(index).items():
            files.setdefault(name, []).append(folder / file)
            listed.add(folder / file)
    for path in tensor_files(folder):
        if path in listed:
            continue
        for name in _names(path):
            if path.suffix == ".safetensors" or name not in files:  # a pickle of the same weights is an older copy
                files.setdefault(name, []).append(path)
    config = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG_FILE} must hold a JSON object, got {type(config).__name__}")
    return Contents(folder=folder, files=files, config=config)


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, by the index of a sharded model."""
    found = read_json(index)
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict):
        raise CheckpointError(f"{index} must hold a weight_map from tensors to files, got {json.dumps(found)[:80]}")
    return names


def _names(path: Path) -> list[str]:
    if path.suffix != ".safetensors":
        return list(_unpickle(path))
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error


def _read(path: Path, names: list[str]) -> dict[str, torch.Tensor]:
    if path.suffix in PICKLES:
        tensors = _unpickle(path)
        missing = [name for name in names if name not in tensors]
    else:
        try:
            with safe_open(path, "pt") as file:
                held = set(file.keys())
                missing = [name for name in names if name not in held]
                tensors = {name: file.get_tensor(name) for name in names if name in held}
        except (OSError, SafetensorError) as error:
            raise _damaged(path, error) from error
    if missing:
        raise CheckpointError(f"{path} must hold {missing}, as its index says; they are missing: restore the file")
    return {name: tensors[name] for name in names}


def _unpickle(path: Path) -> dict[str, torch.Tensor]:
    """A state dict, mapped rather than read where the file allows it; nothing in it is ever run."""
    try:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files of before 2020 cannot be mapped, and torch may find damage in others
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and is not loaded, because that could run code: "
            f"{str(error).splitlines()[0][:120]}; where you trust it, save its tensors as safetensors"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise _damaged(path, error) from error
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise CheckpointError(f"{path} must hold tensors by name (a state dict), got {type(found).__name__} of others")
    return found


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {error}; restore the file")
