"""The processes of one run, under `accelerate launch` or torchrun: who works and who waits. Knows no stage."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from accelerate import PartialState

from medusa_spec.errors import ConfigError, MedusaError

Item = TypeVar("Item")

PATIENCE = timedelta(days=7)
"""How long the others wait for a stage that one process runs: torch would give up after half an hour."""


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The processes of this run, seen from one of them.

    Attributes:
        index: Number of this one.
        count: How many there are.
    """

    index: int = 0
    count: int = 1

    @property
    def main(self) -> bool:
        """Whether this is the one that writes files."""
        return self.index == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """The items that this process is to do: every `count`-th."""
        return list(items[self.index :: self.count])

    def wait(self) -> None:
        """Until all have come here.

        Raises:
            MedusaError: If another one has ended; its own message says why.
        """
        if self.count == 1:
            return
        try:
            PartialState().wait_for_everyone()
        except RuntimeError as error:
            raise MedusaError(f"another process of this run has ended; its own message says why ({error})") from error


def everyone() -> Processes:
    """The processes that a launcher started together; one without a launcher."""
    if "LOCAL_RANK" not in os.environ:  # some clusters set WORLD_SIZE for everything
        return Processes()
    return Processes(index=int(os.environ.get("RANK", "0")), count=int(os.environ.get("WORLD_SIZE", "1")))


def join(device: str | None) -> Processes:
    """Makes the processes know each other, each with a device of its own.

    Args:
        device: As in `FinetuneConfig`: None takes a GPU each if there are any.

    Raises:
        ConfigError: If one numbered device is to serve several processes.
    """
    found = everyone()
    if found.count > 1:
        if device is not None and ":" in device:
            raise ConfigError(
                f"device must be a kind like 'cuda' or 'cpu', or None, for {found.count} processes, got {device!r}: "
                "each process takes one of its own"
            )
        PartialState(cpu=device == "cpu", timeout=PATIENCE)
    return found
