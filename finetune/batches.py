"""The order in which training reads the store: a fixed list of batches, one per step of the whole run."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch.utils.data import Dataset

from medusa_spec.finetune.store import StateStore, Text

WINDOW_SHARDS = 32
"""Shards shuffled together: reads stay near each other on disk when the store is larger than the memory."""

LENGTH_STEP = 16
"""Texts whose lengths differ by less may share a batch, whichever comes first."""

Batch = dict[str, torch.Tensor]


class StepBatches(Dataset[Batch], ABC):
    """Item i is the batch of step i, over all epochs.

    So a resumed run needs no state of a shuffling generator: it goes on with item i.

    Args:
        store: The train split.
        batch_positions: Positions per step.
        epochs: Passes over the store.
        seed: Of the order.
    """

    steps_per_epoch: int

    def __init__(self, store: StateStore, *, batch_positions: int, epochs: int, seed: int) -> None:
        self.store, self.batch_positions, self.epochs, self.seed = store, batch_positions, epochs, seed
        self._ordered: tuple[int, list[torch.Tensor]] | None = None
        self.steps_per_epoch = len(self.order(0))

    def __len__(self) -> int:
        return self.steps_per_epoch * self.epochs

    def __getitem__(self, step: int) -> Batch:
        return self.read(self.numbers(step))

    def numbers(self, step: int) -> torch.Tensor:
        """What a step reads."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self.order(epoch)[place]

    def answers(self, numbers: torch.Tensor) -> Batch:
        """What there is to learn at all positions of a batch, without reading its states: see `StateStore.answers`."""
        return self.store.answers(self.rows(numbers))

    def order(self, epoch: int) -> list[torch.Tensor]:
        """What each step of an epoch reads, as int64 numbers; a function of seed and epoch alone."""
        if self._ordered is None or self._ordered[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._ordered = epoch, list(self.shuffled(generator))
        return self._ordered[1]

    def padding(self) -> float:
        """Share of the positions of an epoch's steps that fill up shorter rows; one epoch is much like another."""
        return 0.0

    @abstractmethod
    def shuffled(self, generator: torch.Generator) -> Iterator[torch.Tensor]:
        """The steps of an epoch: as many whatever the generator draws."""

    @abstractmethod
    def read(self, numbers: torch.Tensor) -> Batch:
        """The batch of a step."""

    @abstractmethod
    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Int64 rows of the store that make up a batch."""

    @abstractmethod
    def flat(self, numbers: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """A column of a batch, a line for each of its `rows`, without padding."""


class PositionBatches(StepBatches):
    """Positions in any order, for heads that read h of one position: see `StateRows`.

    The last batch of an epoch may be smaller.
    """

    def shuffled(self, generator: torch.Generator) -> Iterator[torch.Tensor]:
        """Rows, shuffled within windows of shards."""
        rows = self.store.decoding_rows()
        edges = torch.searchsorted(rows, self.store.starts).tolist()
        by_shard = [rows[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
        shards = torch.randperm(len(by_shard), generator=generator).tolist()
        windows = []
        for start in range(0, len(shards), WINDOW_SHARDS):
            window = torch.cat([by_shard[shard] for shard in shards[start : start + WINDOW_SHARDS]])
            windows.append(window[torch.randperm(len(window), generator=generator)])
        return iter(torch.cat(windows).split(self.batch_positions))

    def read(self, numbers: torch.Tensor) -> Batch:
        """See `StateStore.rows`."""
        return self.store.rows(numbers).batch()

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """They are the numbers."""
        return numbers

    def flat(self, numbers: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Nothing is padded."""
        return column


class TextBatches(StepBatches):
    """Whole texts of similar length, for heads that attend: see `StateStore.batch`; padding counts as positions."""

    def __init__(self, store: StateStore, **kwargs: int) -> None:
        self.texts = store.texts()
        super().__init__(store, **kwargs)

    def shuffled(self, generator: torch.Generator) -> Iterator[torch.Tensor]:
        """Texts of one step of lengths in any order, cut into batches, and those in any order."""
        numbers = torch.randperm(len(self.texts), generator=generator)
        steps = torch.tensor([-(-text.length // LENGTH_STEP) for text in self.texts])
        numbers = numbers[steps[numbers].sort(stable=True).indices]
        batches, first = [], 0
        for place, width in enumerate((steps[numbers] * LENGTH_STEP).tolist()):
            if place > first and (place + 1 - first) * width > self.batch_positions:
                batches.append(numbers[first:place])
                first = place
        batches.append(numbers[first:])
        return (batches[place] for place in torch.randperm(len(batches), generator=generator).tolist())

    def read(self, numbers: torch.Tensor) -> Batch:
        """See `StateStore.batch`."""
        return self.store.batch([self.texts[number] for number in numbers.tolist()])

    def padding(self) -> float:
        """What rows are filled up by to the longest of their step."""
        lengths = torch.tensor([text.length for text in self.texts])
        read = sum(len(numbers) * int(lengths[numbers].max()) for numbers in self.order(0))
        return 1.0 - int(lengths.sum()) / read

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Text after text."""
        texts = [self.texts[number] for number in numbers.tolist()]
        starts = [int(self.store.starts[text.shard]) + text.start for text in texts]
        return torch.cat([start + torch.arange(text.length) for start, text in zip(starts, texts, strict=True)])

    def flat(self, numbers: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """Text after text, each to its own length."""
        lengths = [self.texts[number].length for number in numbers.tolist()]
        return torch.cat([line[:length] for line, length in zip(column, lengths, strict=True)])


def step_batches(store: StateStore, *, attends: bool, batch_positions: int, epochs: int, seed: int) -> StepBatches:
    """The batches that a family reads."""
    kind = TextBatches if attends else PositionBatches
    return kind(store, batch_positions=batch_positions, epochs=epochs, seed=seed)


def in_order(
    store: StateStore, *, attends: bool, batch_positions: int = 2048, limit: int | None = None
) -> Iterator[Batch]:
    """All positions at which decoding would draft, once, in the order of the store.

    Args:
        store: Any.
        attends: Whether whole texts are read.
        batch_positions: Most positions of a batch.
        limit: About so many positions alone, spread evenly over the store: it begins with the longest texts.
    """
    rows = store.decoding_rows()
    share = 1.0 if limit is None else min(1.0, limit / max(1, len(rows)))
    if not attends:
        for numbers in rows[_spread(len(rows), share)].split(batch_positions):
            yield store.rows(numbers).batch()
        return
    batch: list[Text] = []
    width = 0
    texts = store.texts()  # of falling length, unless some were known before: see `reuse`
    for text in (texts[number] for number in _spread(len(texts), share).tolist()):
        width = max(width, text.length)
        if batch and (len(batch) + 1) * width > batch_positions:
            yield store.batch(batch)
            batch, width = [], text.length
        batch.append(text)
    if batch:
        yield store.batch(batch)


def _spread(count: int, share: float) -> torch.Tensor:
    """Int64: numbers below `count`, evenly spread, a share of them and at least one."""
    kept = min(count, max(1, round(count * share)))
    return torch.arange(kept) * count // max(1, kept)
