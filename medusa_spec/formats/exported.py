"""What a writer of a foreign format hands over: tensors, config, file. Knows no format and no folder."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class Exported:
    """Heads as another project's engine reads them.

    Attributes:
        format: Name of the format, for people.
        file: The one file of tensors.
        tensors: By the format's names.
        config: Of `config.json`, without what every format says.
        same_guesses: The first guess is everywhere that of the heads; false where the format cannot keep a draft
            vocabulary, so that a guess may fall outside of it.
        notes: What the user has to know, a sentence each.
        beside: Other files of the folder by name, and what they are copied from.
    """

    format: str
    file: str
    tensors: dict[str, torch.Tensor] = field(repr=False)
    config: dict[str, Any]
    same_guesses: bool = True
    notes: tuple[str, ...] = ()
    beside: dict[str, Path] = field(default_factory=dict)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor in memory of their own, as a file holds them."""
    return tensor.detach().to("cpu", copy=True).contiguous()
