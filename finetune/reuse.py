"""States that another run has already read: the target reads a conversation once, however many heads learn from it."""

import hashlib
from pathlib import Path

import torch

from medusa_spec.errors import ConfigError
from medusa_spec.finetune import stages
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data import SPLITS
from medusa_spec.finetune.store import StateStore, read_shard, shard_path
from medusa_spec.finetune.target import compute_dtype
from medusa_spec.finetune.tokens import Conversation, TokenData

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""h [T, H], targets int32 [T, K + 1] and positions int32 [T] of one conversation."""


class KnownStates:
    """The states of the finished run `config.states_from`, by conversation.

    Args:
        config: The run that asks.

    Raises:
        ConfigError: If that run's states are not finished, or were read with another model, dtype or number of heads.
    """

    def __init__(self, config: FinetuneConfig) -> None:
        assert config.states_from is not None
        output = Path(config.states_from)
        theirs = stages.read_done(output, "states")["settings"] | stages.read_done(output, "data")["settings"]
        ours = {
            "model": config.model,
            "revision": config.revision,
            "num_heads": config.num_heads,
            "dtype": str(compute_dtype(config)),
        }
        for name, value in ours.items():
            if theirs[name] != value:
                raise ConfigError(
                    f"states_from must be a run with {name} {value!r}, the one in {output} has {theirs[name]!r}; "
                    "leave states_from out to read the states anew"
                )
        self._folder = output / "states"
        self._places: dict[str, tuple[str, int, int, int]] = {}
        for split in SPLITS:
            data, store = TokenData(output / "data", split), StateStore(output / "states", split)
            for shard, numbers in enumerate(store.conversations):
                values, counts = torch.unique_consecutive(numbers, return_counts=True)
                ends = counts.cumsum(0).tolist()
                for number, start, end in zip(values.tolist(), [0, *ends], ends, strict=False):
                    self._places[_name(data[number])] = split, shard, start, end
        self._open: dict[tuple[str, int], dict[str, torch.Tensor]] = {}

    def find(self, conversation: Conversation) -> Part | None:
        """The states of a conversation with the same tokens and mask, or None."""
        place = self._places.get(_name(conversation))
        if place is None:
            return None
        split, shard, start, end = place
        if (split, shard) not in self._open:
            self._open[split, shard] = read_shard(shard_path(self._folder, split, shard))
        tensors = self._open[split, shard]
        return tensors["h"][start:end], tensors["targets"][start:end], tensors["position"][start:end]


def _name(conversation: Conversation) -> str:
    digest = hashlib.sha256(conversation.input_ids.numpy().tobytes())
    digest.update(conversation.mask.numpy().tobytes())
    return digest.hexdigest()
