"""A name for a target's weights that costs no loading of them. Knows files, not what is in them."""

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from medusa_spec.errors import CheckpointError
from medusa_spec.finetune.config import FinetuneConfig

SAMPLE = 1024
"""Bytes read at the beginning, in the middle and at the end of every tensor."""

BLOCKS = 64
"""Places read of a file of another format."""


def weights_name(config: FinetuneConfig) -> str | None:
    """What tells the weights of `config.model` from others under the same name; None if nothing does.

    For a folder it is a hash over names, shapes and a few bytes of every tensor: it is the same for a copy on another
    machine or in other shards, and another one as soon as any tensor is trained. For a model of the hub it is the
    commit.
    """
    folder = Path(config.model)
    if not folder.is_dir():
        commit = getattr(AutoConfig.from_pretrained(config.model, revision=config.revision), "_commit_hash", None)
        return None if commit is None else f"commit:{commit}"
    digests = sorted(_tensors(folder)) or sorted(_blocks(path) for path in _other_files(folder))
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16] if digests else None


def _tensors(folder: Path) -> list[str]:
    """A hash of each tensor of the safetensors files."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            found += _tensors_of(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; restore the file") from error
    return found


def _tensors_of(path: Path) -> list[str]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
        found = []
        for name, about in header.items():
            if name == "__metadata__":
                continue
            start, end = (8 + length + offset for offset in about["data_offsets"])
            digest = hashlib.sha256(repr((name, about["dtype"], about["shape"])).encode())
            for place in (start, (start + end - SAMPLE) // 2, end - SAMPLE):
                file.seek(max(start, place))
                digest.update(file.read(min(SAMPLE, end - max(start, place))))
            found.append(digest.hexdigest())
    return found


def _other_files(folder: Path) -> list[Path]:
    return [path for ending in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(ending)]


def _blocks(path: Path) -> str:
    """A hash of a file's name, its size, and blocks spread over it."""
    size = path.stat().st_size
    digest = hashlib.sha256(repr((path.name, size)).encode())
    with path.open("rb") as file:
        for number in range(BLOCKS):
            file.seek(number * max(0, size - SAMPLE) // (BLOCKS - 1))
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()
