"""Files that are whole or not there: written under a temporary name, then renamed."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from medusa_spec.errors import CheckpointError
from medusa_spec.unfinished import unfinished


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path whose file takes the name `path` once it is complete and on the disk.

    A kill, an interrupt or a full disk leaves what was at `path` before, or nothing; folders are made. A kill also
    leaves the temporary file, in a folder that `remove_unfinished` removes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(path) as scratch:
        temporary, usual = scratch / path.name, scratch / ".mode"
        yield temporary
        usual.touch()
        shutil.copymode(usual, temporary)  # some writers make files that only their owner may read
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path`, which never holds a part of it."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON with sorted keys."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        CheckpointError: If it is missing or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; restore it, or make again what wrote it") from error


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file; the disk may fill up, but `path` is then simply not there."""
    with whole_file(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)
