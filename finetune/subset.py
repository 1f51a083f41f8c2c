"""Parts of a store: nested sets of conversations, for what more data brings. Knows no training."""

from collections.abc import Sequence
from pathlib import Path

import torch

from medusa_spec.finetune.store import StateStore, Text
from medusa_spec.finetune.tokens import TokenData


class SubsetStore(StateStore):
    """A store of which some conversations alone are trained on.

    Args:
        output: As for `StateStore`, and so are the next two.
        split: Its split.
        num_heads: K.
        kept: Bool, by number of the conversation.
        teacher: As for `StateStore`.
    """

    def __init__(self, output: Path, split: str, num_heads: int, kept: torch.Tensor, *, teacher: bool = False) -> None:
        super().__init__(output, split, num_heads, teacher=teacher)
        self.kept = kept

    def decoding_rows(self) -> torch.Tensor:
        """Those of the kept conversations."""
        rows = super().decoding_rows()
        return rows[self.kept[torch.cat(self.conversations)[rows].long()]]

    def texts(self) -> list[Text]:
        """Those of the kept conversations."""
        return [text for text in super().texts() if self.kept[int(self.conversations[text.shard][text.start])]]


def nested_subsets(answer_tokens: Sequence[int], sizes: Sequence[int], *, seed: int) -> list[torch.Tensor]:
    """Conversations drawn in one order, up to each size: a smaller set is part of every larger one.

    ```
    answer tokens 5 3 4, drawn in the order 2 0 1      size 4: {2}      size 5: {2, 0}      size 12: all
    ```

    Args:
        answer_tokens: By number of the conversation.
        sizes: Answer tokens wanted; a set is the shortest with at least as many, or all there are.
        seed: Of the order.

    Returns:
        Bool masks, by number of the conversation.
    """
    order = torch.randperm(len(answer_tokens), generator=torch.Generator().manual_seed(seed))
    totals = torch.tensor(answer_tokens)[order].cumsum(0)
    found = []
    for size in sizes:
        kept = torch.zeros(len(order), dtype=torch.bool)
        kept[order[: int((totals < size).sum()) + 1]] = True
        found.append(kept)
    return found


def answer_tokens(data: TokenData) -> list[int]:
    """Answer tokens of each conversation."""
    return [int(conversation.mask.sum()) for conversation in data]


def answer_counts(data: TokenData, kept: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Int64 [V]: how often each id is an answer token of the kept conversations."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for number in kept.nonzero().flatten().tolist():
        conversation = data[number]
        counts += torch.bincount(conversation.input_ids[conversation.mask].long(), minlength=vocab_size)
    return counts
