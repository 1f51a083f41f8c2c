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

    def texts(self) -> list[Text]:
        """All of them, in the order of the data."""
        return [Text(shard=0, start=number, length=length) for number, length in enumerate(self.data.lengths())]

    def batch(self, texts: list[Text]) -> dict[str, torch.Tensor]:
        """Texts side by side, shorter ones filled up on the right.

        Returns:
            `input_ids` int64 [B, T]; `targets` int32 [B, T, K + 1] and `tokens` int64 [B, T, K] as in a batch of the
            store.
        """
        columns: dict[str, list[torch.Tensor]] = {"input_ids": [], "targets": [], "tokens": []}
        for text in texts:
            conversation = self.data[text.start]
            ids = conversation.input_ids.to(torch.int64)
            everywhere = torch.ones_like(conversation.mask)
            columns["input_ids"].append(ids)
            columns["targets"].append(make_targets(conversation.input_ids, conversation.mask, self.num_heads))
            after = make_targets(conversation.input_ids, everywhere, self.num_heads)[:, :-1]
            columns["tokens"].append(after.to(torch.int64).clamp_min(0))
        filling = {"targets": UNTRAINED}
        pad = torch.nn.utils.rnn.pad_sequence
        return {name: pad(parts, True, filling.get(name, 0)) for name, parts in columns.items()}
