"""Texts as joint training reads them: token ids instead of stored states, which change with the target."""

from pathlib import Path

import torch

from medusa_spec.finetune.store import UNTRAINED, Text, make_targets
from medusa_spec.finetune.tokens import TokenData


class TokenTexts:
    """The texts of a split; has of a `StateStore` what `TextBatches` asks for.

    Args:
        output: Folder of the run, whose data are finished.
        split: `train` or `held_out`.
        num_heads: K.
    """

    def __init__(self, output: Path, split: str, num_heads: int) -> None:
        self.data, self.num_heads = TokenData(output / "data", split), num_heads
        self._offsets = torch.tensor([0, *self.data.lengths()]).cumsum(0)
        self.starts = self._offsets[[0, -1]]

    def texts(self) -> list[Text]:
        """All of them, in the order of the data."""
        starts = self._offsets.tolist()
        return [
            Text(shard=0, start=start, length=end - start) for start, end in zip(starts[:-1], starts[1:], strict=True)
        ]

    def where(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Conversations and positions of rows, which are counted through all texts: both int64 [T]."""
        numbers = torch.searchsorted(self._offsets, rows, right=True) - 1
        return numbers, rows - self._offsets[numbers]

    def answers(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """What there is to learn at rows [T]: `targets` int32 [T, K + 1]."""
        numbers, positions = self.where(rows)
        found = torch.empty(len(rows), self.num_heads + 1, dtype=torch.int32)
        for number in numbers.unique().tolist():
            places = numbers == number
            found[places] = self._targets(number)[positions[places]]
        return {"targets": found}

    def batch(self, texts: list[Text]) -> dict[str, torch.Tensor]:
        """Texts side by side, shorter ones filled up on the right.

        Returns:
            `input_ids` int64 [B, T]; `targets` int32 [B, T, K + 1] and `tokens` int64 [B, T, K] as in a batch of the
            store.
        """
        columns: dict[str, list[torch.Tensor]] = {"input_ids": [], "targets": [], "tokens": []}
        for number in self.where(torch.tensor([text.start for text in texts]))[0].tolist():
            conversation = self.data[number]
            everywhere = torch.ones_like(conversation.mask)
            after = make_targets(conversation.input_ids, everywhere, self.num_heads)[:, :-1]
            columns["input_ids"].append(conversation.input_ids.to(torch.int64))
            columns["targets"].append(self._targets(number))
            columns["tokens"].append(after.to(torch.int64).clamp_min(0))
        filling = {"targets": UNTRAINED}
        pad = torch.nn.utils.rnn.pad_sequence
        return {name: pad(parts, True, filling.get(name, 0)) for name, parts in columns.items()}

    def _targets(self, number: int) -> torch.Tensor:
        conversation = self.data[number]
        return make_targets(conversation.input_ids, conversation.mask, self.num_heads)
