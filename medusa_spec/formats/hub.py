"""Which files of a repository on the hub are heads, so that no target is downloaded with them. Reads no tensor."""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from medusa_spec.errors import CheckpointError
from medusa_spec.files import read_json
from medusa_spec.formats.contents import CONFIG_FILE, NO_WEIGHTS, tensor_files, weight_map

HEAD_KEYS = (
    "medusa_num_heads",
    "num_medusa_heads",
    "medusa",
    "hydra_num_heads",
    "speculators_model_type",
    "draft_vocab_size",
    "n_predict",
)
HEAD_TYPES = ("medusa", "mlp_speculator", "eagle")
HEAD_CLASSES = re.compile(
    r"Medusa(Model|ForCausalLM)|\w+ForCausalLMEagle3?|Eagle3?(Model|DraftModel|Speculator|\w+ForCausalLM)|MLPSpeculator\w*"
)
HEAD_NAMES = ("medusa_head.", "medusa_heads.")
"""Beginnings of the names of heads inside a full model."""
DRAFT_NAMES = ("fc.weight", "midlayer.", "d2t", "speculator.", "emb.0.")
"""Beginnings of names that only heads have, so that all shards are theirs."""


def speaks_of_heads(config: Any) -> bool:
    """Whether a `config.json` is that of heads (or of a target with heads), of a kind that can be read or named."""
    if not isinstance(config, dict):
        return False
    classes = (*(config.get("architectures") or ()), config.get("architecture"))
    keys = any(config.get(key) is not None for key in HEAD_KEYS)
    return keys or config.get("model_type") in HEAD_TYPES or any(HEAD_CLASSES.fullmatch(str(name)) for name in classes)


def fetch(repository: str, own: list[str], *, own_config: str) -> Path:
    """Downloads heads: our own files if there are such, else the files that hold foreign ones.

    Args:
        repository: Hub id.
        own: Our files.
        own_config: The one of them that a folder of ours has.

    Raises:
        CheckpointError: If nothing there speaks of heads.
    """
    folder = Path(snapshot_download(repository, allow_patterns=[*own, CONFIG_FILE, "*.index.json"]))
    if (folder / own_config).is_file():
        return folder
    shards = _shards(folder)
    with_heads = sorted(file for file, names in shards.items() if any(name.startswith(HEAD_NAMES) for name in names))
    if any(name.startswith(DRAFT_NAMES) for names in shards.values() for name in names):
        with_heads = sorted(shards)
    if with_heads:
        return Path(snapshot_download(repository, allow_patterns=[CONFIG_FILE, "*.index.json", *with_heads]))
    config = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    if not speaks_of_heads(config) and not _one_layer(config):
        raise CheckpointError(f"{repository} holds no {own_config}, and its {CONFIG_FILE} says nothing of heads")
    ignored = [*NO_WEIGHTS, *shards, "*.index.json", "*/*"]  # those shards are a target without heads
    for patterns in (["*.safetensors"], ["*.pt", "*.bin"]):
        folder = Path(snapshot_download(repository, allow_patterns=[CONFIG_FILE, *patterns], ignore_patterns=ignored))
        if tensor_files(folder):
            break
    return folder


def _one_layer(config: Any) -> bool:
    """Whether a config is of a single decoder layer, as that of EAGLE-1, which says no more than this."""
    return isinstance(config, dict) and config.get("num_hidden_layers") == 1


def _shards(folder: Path) -> dict[str, list[str]]:
    """Shards of a full model, by its index, and the names of their tensors."""
    found: dict[str, list[str]] = {}
    for index in folder.glob("*.index.json"):
        for name, file in weight_map(index).items():
            found.setdefault(file, []).append(name)
    return found
