"""States that an engine has dumped, taken for conversations after their layers have been recognised by the target."""

from collections.abc import Mapping
from pathlib import Path

import torch

from medusa_spec.backbone import Backbone
from medusa_spec.errors import ConfigError
from medusa_spec.finetune.dumps import Dump, read_states
from medusa_spec.finetune.store import kept_positions
from medusa_spec.finetune.tokens import Conversation, TokenData
from medusa_spec.last_norm import LastNorm

CHECKED = 4
"""Conversations, from the shortest to the longest, that the target reads to recognise the columns."""

CHECKED_TOKENS = 256
"""Of each of them."""

BOUND = 0.05
"""Relative error up to which a column is a layer of the target. *Measured* on a model of 30 layers: 0.015 between
float32 and bfloat16, 0.2 and more between neighbouring layers."""

AHEAD = 3.0
"""So many times smaller than at any other layer must the error be."""

H = "h"


class DumpedStates:
    """A dump's states, by conversation.

    Args:
        folder: The dump.
        data: The run's conversations by split.
        backbone: The target, which reads a few of them itself.
        max_length: Of the run's conversations.
        whole: Whether whole texts are wanted.
        taps: Layers wanted beside h.

    Raises:
        ConfigError: If the dump holds none of the conversations, or is of another model, or lacks a layer.
        CheckpointError: If a file cannot be read.
    """

    def __init__(
        self,
        folder: str,
        data: Mapping[str, TokenData],
        backbone: Backbone,
        *,
        max_length: int,
        whole: bool,
        taps: tuple[int, ...],
    ) -> None:
        self.dump, self._whole, self._taps = Dump(folder, max_length), whole, taps
        if self.dump.hidden_size != backbone.hidden_size:
            raise ConfigError(
                f"states_dump must hold states of hidden size {backbone.hidden_size}, the target's, got "
                f"{self.dump.hidden_size} in {folder}: it is a dump of another model"
            )
        self._norm = LastNorm(backbone)
        found = [conversation for split in data.values() for conversation in split if self._path(conversation)]
        if not found:
            raise ConfigError(
                f"states_dump must hold conversations of the data by their token ids, got none of them in {folder}: it "
                "was made with another tokenizer, chat template or max_length; have the engine read what `python -m "
                "medusa_spec.finetune.dumps requests RUN FILE` writes"
            )
        self.columns = self._recognised(found)
        self._h, self._layers = self._chosen()

    def __contains__(self, conversation: Conversation) -> bool:
        return self._path(conversation) is not None

    def find(self, conversation: Conversation) -> dict[str, torch.Tensor] | None:
        """The states of a conversation, or None if the dump does not hold it."""
        path = self._path(conversation)
        if path is None:
            return None
        places = kept_positions(conversation.mask, whole=self._whole)
        states = read_states(path, places, [self._h, *self._layers])
        h = states[:, 0] if self.columns[self._h] == H else self._norm(states[:, 0])
        part = {"h": h.to("cpu", torch.bfloat16), "position": places.to(torch.int32)}
        return part | ({"layers": states[:, 1:].to(torch.bfloat16)} if self._layers else {})

    def _path(self, conversation: Conversation) -> Path | None:
        kept = kept_positions(conversation.mask, whole=self._whole)
        return self.dump.find(conversation.input_ids, int(kept[-1]) + 1 if len(kept) else 1)

    def _recognised(self, found: list[Conversation]) -> list[int | str]:
        """What each column is: a number of a layer whose input it is (n for what leaves the last), or `H`."""
        by_length = sorted(found, key=lambda conversation: len(conversation.input_ids))
        places = {round(place * (len(by_length) - 1) / max(1, CHECKED - 1)) for place in range(CHECKED)}
        errors = torch.stack([self._errors(by_length[place]) for place in sorted(places)]).amax(0)
        names: list[int | str] = [*range(len(self._norm.layers) + 1), H]
        best, two = errors.argmin(1).tolist(), errors.topk(2, largest=False).values
        unknown = [
            f"column {column}: {_words(names[best[column]], len(names) - 2)} at {low:.3f}, the next at {high:.3f}"
            for column, (low, high) in enumerate(two.tolist())
            if not (low <= BOUND and high >= AHEAD * low)
        ]
        if unknown:
            raise ConfigError(
                f"states_dump must hold states of the target, but those in {self.dump.folder} are not the target's own "
                f"within a relative error of {BOUND}: {'; '.join(unknown)}. It is a dump of another model, of other "
                "weights or positions, or of a coarser number format; leave it out to have the target read the data"
            )
        return [names[place] for place in best]

    def _errors(self, conversation: Conversation) -> torch.Tensor:
        """Relative error [L, n + 2] of every column at every state of the target, the median over the tokens."""
        path = self._path(conversation)
        assert path is not None
        places = kept_positions(conversation.mask, whole=self._whole)
        ids = conversation.input_ids[: min(len(conversation.input_ids), CHECKED_TOKENS)].long()
        own = self._norm.states(ids).float().cpu()
        places = places[places < len(ids)]
        if not len(places):  # a long prompt: its own tokens will do
            places = torch.arange(len(ids))
        own = own[places]
        dumped = read_states(path, places, range(self.dump.columns)).float()
        apart = [(column[:, None] - own).norm(dim=-1) / own.norm(dim=-1) for column in dumped.unbind(1)]
        return torch.stack([error.median(0).values for error in apart])

    def _chosen(self) -> tuple[int, list[int]]:
        """The columns of h and of the taps."""
        last = len(self._norm.layers)
        h = next((self.columns.index(name) for name in (H, last) if name in self.columns), None)
        missing = [tap for tap in self._taps if tap not in self.columns] + ([] if h is not None else [last])
        if h is None or missing:
            needed = [*self._taps, last]
            raise ConfigError(
                f"states_dump must hold layers {needed} ({last} is what leaves the last one), those in "
                f"{self.dump.folder} are {self.columns}: {missing} missing; have the engine dump "
                f"eagle_aux_hidden_state_layer_ids = {needed}"
            )
        return h, [self.columns.index(tap) for tap in self._taps]


def _words(name: int | str, last: int) -> str:
    if name == H:
        return "nearest is h"
    return "nearest is what leaves the last layer" if name == last else f"nearest is what enters layer {name}"
