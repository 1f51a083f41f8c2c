"""Tokenised conversations on disk, memory-mapped. Knows ids, masks and offsets, not where they come from."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from medusa_spec.errors import DataError
from medusa_spec.files import read_json, write_tensors

SHARD_TOKENS = 1 << 23


class TokenWriter:
    """Collects conversations and writes them as shards `<split>-00000.safetensors`."""

    def __init__(self, folder: Path, split: str, *, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.ids: list[torch.Tensor] = []
        self.masks: list[torch.Tensor] = []
        self.pending = self.tokens = self.answer_tokens = self.conversations = self.shards = 0

    def add(self, input_ids: list[int], mask: list[bool]) -> None:
        """Appends one conversation."""
        self.ids.append(torch.tensor(input_ids, dtype=torch.int32))
        self.masks.append(torch.tensor(mask, dtype=torch.bool))
        self.conversations += 1
        self.pending += len(input_ids)
        self.tokens += len(input_ids)
        self.answer_tokens += sum(mask)
        if self.pending >= self.shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Writes what has been collected."""
        if not self.ids:
            return
        lengths = torch.tensor([0, *map(len, self.ids)], dtype=torch.int64)
        tensors = {
            "input_ids": torch.cat(self.ids),
            "mask": torch.cat(self.masks),
            "offsets": torch.cumsum(lengths, 0),
        }
        write_tensors(self.folder / f"{self.split}-{self.shards:05d}.safetensors", tensors)
        self.ids, self.masks, self.pending = [], [], 0
        self.shards += 1

    def counts(self) -> dict[str, int]:
        """What was written, for the manifest."""
        return {
            "conversations": self.conversations,
            "tokens": self.tokens,
            "answer_tokens": self.answer_tokens,
            "shards": self.shards,
        }


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One conversation.

    Attributes:
        input_ids: Int32 [T].
        mask: Bool [T], true at the tokens that heads learn from.
    """

    input_ids: torch.Tensor
    mask: torch.Tensor


class TokenData:
    """The conversations of one split of a data folder, in the order in which they were written."""

    def __init__(self, folder: Path, split: str) -> None:
        counts = read_json(folder / "manifest.json")["splits"][split]
        self.shards: list[dict[str, torch.Tensor]] = []
        self.index: list[tuple[int, int]] = []
        for number in range(counts["shards"]):
            path = folder / f"{split}-{number:05d}.safetensors"
            try:
                with safe_open(path, framework="pt") as file:
                    shard = {key: file.get_tensor(key) for key in ("input_ids", "mask", "offsets")}
            except Exception as error:
                raise DataError(f"{path} cannot be read ({error}); run the data stage again") from error
            self.index += [(number, row) for row in range(len(shard["offsets"]) - 1)]
            self.shards.append(shard)
        if len(self.index) != counts["conversations"]:
            raise DataError(
                f"{folder} must hold {counts['conversations']} {split} conversations as its manifest says, "
                f"got {len(self.index)}; run the data stage again"
            )

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> Conversation:
        shard, row = self.index[number]
        tensors = self.shards[shard]
        start, end = tensors["offsets"][row : row + 2].tolist()
        return Conversation(input_ids=tensors["input_ids"][start:end], mask=tensors["mask"][start:end])

    def __iter__(self) -> Iterator[Conversation]:
        return (self[number] for number in range(len(self)))

    def lengths(self) -> list[int]:
        """Number of tokens of each conversation."""
        return [length for shard in self.shards for length in shard["offsets"].diff().tolist()]

    def answer_counts(self, vocab_size: int) -> torch.Tensor:
        """Int64 [V]: how often each id is an answer token."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for shard in self.shards:
            ids = shard["input_ids"][shard["mask"]].to(torch.int64)
            if ids.numel() and int(ids.max()) >= vocab_size:
                raise DataError(
                    f"token ids must be below {vocab_size} (the target's vocabulary), got {int(ids.max())}; "
                    "was the data made with another tokenizer?"
                )
            counts += torch.bincount(ids, minlength=vocab_size)
        return counts
