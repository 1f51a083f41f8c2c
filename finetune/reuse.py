"""States that another run has already read: the target reads a conversation once, however many heads learn from it."""

import hashlib
from pathlib import Path
from typing import Any

import torch

from medusa_spec.errors import ConfigError
from medusa_spec.finetune import stages
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data import SPLITS
from medusa_spec.finetune.store import kept_positions, read_shard, shard_path
from medusa_spec.finetune.target import compute_dtype
from medusa_spec.finetune.tokens import Conversation, TokenData
from medusa_spec.finetune.weights import weights_name

Part = dict[str, torch.Tensor]
"""Columns of one conversation: h [T, H], positions int32 [T], and layers [T, L, H] where some are tapped."""


class KnownStates:
    """The states of the finished run `config.states_from`, by conversation.

    Args:
        config: The run that asks.
        whole: Whether it wants whole texts.
        taps: Layers that it wants.

    Raises:
        ConfigError: If that run's states are not finished, or were read with another model or dtype, or are not all
            that is wanted.
    """

    def __init__(self, config: FinetuneConfig, *, whole: bool, taps: tuple[int, ...]) -> None:
        assert config.states_from is not None
        output = Path(config.states_from)
        theirs = stages.read_done(output, "states")["settings"] | stages.read_done(output, "data")["settings"]
        ours: dict[str, Any] = {"model": config.model, "revision": config.revision, "dtype": str(compute_dtype(config))}
        ours |= {"whole": True} if whole else {}
        ours |= {"taps": list(taps)} if taps else {}
        if "weights" in theirs and theirs["model"] == config.model:
            ours["weights"] = weights_name(config)
        for name, value in ours.items():
            if theirs.get(name) != value:  # an older version did not note all of them
                raise ConfigError(
                    f"states_from must be a run with {name} {value!r}, the one in {output} has {theirs.get(name)!r}; "
                    "leave states_from out to read the states anew"
                )
        self._folder, self._whole, self._taps = output / "states", whole, bool(taps)
        self._places: dict[str, tuple[str, int, int, int]] = {}
        self._open: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
        for split in SPLITS:
            data = TokenData(output / "data", split)
            for shard in range(len(stages.read_done(output, "states")["result"]["splits"][split])):
                numbers = self._shard(split, shard)["conversation"]
                values, counts = torch.unique_consecutive(numbers, return_counts=True)
                ends = counts.cumsum(0).tolist()
                for number, start, end in zip(values.tolist(), [0, *ends], ends, strict=False):
                    self._places[_name(data[number])] = split, shard, start, end

    def __contains__(self, conversation: Conversation) -> bool:
        return _name(conversation) in self._places

    def find(self, conversation: Conversation) -> Part | None:
        """The states of a conversation with the same tokens and mask, or None."""
        place = self._places.get(_name(conversation))
        if place is None:
            return None
        split, shard, start, end = place
        columns = ("h", "position", *(["layers"] if self._taps else []))
        part = {name: self._shard(split, shard)[name][start:end] for name in columns}
        wanted = torch.isin(part["position"], kept_positions(conversation.mask, whole=self._whole))
        return part if wanted.all() else {name: column[wanted] for name, column in part.items()}

    def _shard(self, split: str, number: int) -> dict[str, torch.Tensor]:
        if (split, number) not in self._open:
            self._open[split, number] = read_shard(shard_path(self._folder, split, number))
        return self._open[split, number]


def _name(conversation: Conversation) -> str:
    digest = hashlib.sha256(conversation.input_ids.numpy().tobytes())
    digest.update(conversation.mask.numpy().tobytes())
    return digest.hexdigest()
