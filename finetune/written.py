"""States that the target had anyway while it wrote a text: kept as a dump, so that it need not read its own words."""

from pathlib import Path
from typing import Any

import torch

from medusa_spec.batch import Keep
from medusa_spec.files import write_tensors
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.dumps import IDS, STATES
from medusa_spec.finetune.wanted import wanted_states
from medusa_spec.finetune.writer import Written

FOLDER = "written"


def written_folder(config: FinetuneConfig) -> Path:
    """Where they lie, a file a conversation; see `dumps`."""
    return Path(config.output) / FOLDER


def keep_of(config: FinetuneConfig) -> Keep | None:
    """What the target's states are kept of while it writes; None if nothing is."""
    return Keep(taps=wanted_states(config).taps) if config.keep_states else None


def settings(config: FinetuneConfig) -> dict[str, Any]:
    """What that adds to the settings of a stage that writes."""
    keep = keep_of(config)
    return {} if keep is None else {"kept_states": list(keep.taps)}


def store(config: FinetuneConfig, name: str, number: int, text: Written) -> None:
    """Keeps the states of a text; those of a conversation that went on take the place of what was there before.

    Args:
        config: Names the folder.
        name: Of the stage.
        number: Of the conversation in it.
        text: What was written.
    """
    if text.states is None:
        return
    tensors = {STATES: text.states.contiguous(), IDS: torch.tensor(text.read, dtype=torch.int64)}
    write_tensors(written_folder(config) / f"{name}-{number:07d}.safetensors", tensors, {"format": "pt"})
