"""States that need not be read by the target: from another run, or from an engine's dump. Knows where to look first."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from transformers.utils import logging

from medusa_spec.errors import ConfigError
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.dumped import DumpedStates
from medusa_spec.finetune.reuse import KnownStates
from medusa_spec.finetune.tokens import Conversation, TokenData
from medusa_spec.finetune.written import FOLDER, written_folder

logger = logging.get_logger(__name__)


class Source(Protocol):
    """What has states of some conversations."""

    def __contains__(self, conversation: Conversation) -> bool: ...

    def find(self, conversation: Conversation) -> dict[str, torch.Tensor] | None:
        """The states of a conversation, or None."""
        ...


class Known:
    """Several sources, asked in their order.

    Args:
        sources: By the setting that names them.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.sources = sources

    def find(self, conversation: Conversation) -> dict[str, torch.Tensor] | None:
        """The states of a conversation from the first source that has it, or None."""
        for source in self.sources.values():
            part = source.find(conversation)
            if part is not None:
                return part
        return None

    def counts(self, data: Sequence[TokenData]) -> dict[str, int]:
        """How many conversations come from each source, and how many the target reads."""
        found = dict.fromkeys([*self.sources, "target"], 0)
        for split in data:
            for conversation in split:
                first = next((name for name, source in self.sources.items() if conversation in source), "target")
                found[first] += 1
        return found


def known_states(
    config: FinetuneConfig, data: Mapping[str, TokenData], target: Any, *, whole: bool, taps: tuple[int, ...]
) -> Known | None:
    """The sources that the settings name; None if they name none.

    Args:
        config: Names them.
        data: The run's conversations by split.
        target: Has the backbone, which is asked for where there is a dump.
        whole: Whether whole texts are wanted.
        taps: Layers wanted beside h.
    """
    sources: dict[str, Source] = {}
    if config.states_from is not None:
        sources["states_from"] = KnownStates(config, whole=whole, taps=taps)
    if config.states_dump is not None:
        sources["states_dump"] = DumpedStates(
            config.states_dump, data, target.backbone, max_length=config.max_length, whole=whole, taps=taps
        )
    if config.keep_states:
        written = _written(config, data, target, whole=whole, taps=taps)
        sources |= {} if written is None else {FOLDER: written}
    return Known(sources) if sources else None


def _written(
    config: FinetuneConfig, data: Mapping[str, TokenData], target: Any, *, whole: bool, taps: tuple[int, ...]
) -> DumpedStates | None:
    """What was kept while the target wrote; None if its texts read otherwise now: then it reads them."""
    folder = str(written_folder(config))
    try:
        return DumpedStates(folder, data, target.backbone, max_length=config.max_length, whole=whole, taps=taps)
    except ConfigError as error:
        logger.warning(f"states kept while the target wrote cannot be used, so it reads its texts again: {error}")
        return None
