"""The hidden-state store: what the target computed at the positions heads read. Knows tensors, not the model."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open

from medusa_spec.errors import CheckpointError
from medusa_spec.files import read_json, write_tensors
from medusa_spec.finetune.teacher_shards import TeacherShards
from medusa_spec.finetune.tokens import TokenData

UNTRAINED = -100
COLUMNS = ("h", "conversation", "position")


def make_targets(input_ids: torch.Tensor, mask: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What the target chose after each position of a conversation, and after that.

    ```
    ids 5 6 7 8, mask · · ■ ■, K = 1        t   column 0 (t + 1)   column 1 (head 0, t + 2)
                                            0   -100               7
                                            1   7                  8
                                            2   8                  -100
                                            3   -100               -100
    ```

    Args:
        input_ids: Int [T].
        mask: Bool [T], true at trained tokens.
        num_heads: K.

    Returns:
        Int32 [T, K + 1]: column j is the token at t + 1 + j, `UNTRAINED` where that is outside or masked. Head k's
        target is column k + 1.
    """
    length = torch.tensor(len(input_ids))
    places, inside = _after(torch.arange(len(input_ids)), length, num_heads + 1)
    return torch.where(inside & mask[places], input_ids.to(torch.int32)[places], UNTRAINED)


def _after(places: torch.Tensor, ends: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` places after each of `places` [T], and whether they lie before its end: both [T, count]."""
    following = places[:, None] + torch.arange(1, count + 1)
    inside = following < ends[..., None]
    return torch.where(inside, following, 0), inside


def kept_positions(mask: torch.Tensor, *, whole: bool) -> torch.Tensor:
    """Int64 positions of a conversation that the store keeps.

    ```
    mask · · ■ ■ ·    answers alone: 1 2, the positions after which the target chose; whole: 0 1 2, up to the last one
    ```
    """
    chosen = mask[1:].nonzero().flatten()
    return torch.arange(int(chosen[-1]) + 1 if len(chosen) else 0) if whole else chosen


@dataclass(frozen=True, kw_only=True)
class StateRows:
    """Rows of the store.

    Attributes:
        h: [T, H].
        targets: Int32 [T, K + 1], what the target chose after each position, and after that; see `StateStore.targets`.
        teacher: `teacher_ids` and `teacher_probs`, if the store has any; see `TeacherShards.rows`.
    """

    h: torch.Tensor
    targets: torch.Tensor
    teacher: dict[str, torch.Tensor] = field(default_factory=dict)

    def batch(self) -> dict[str, torch.Tensor]:
        """As heads take them."""
        return {"h": self.h, "targets": self.targets, **self.teacher}


@dataclass(frozen=True, kw_only=True)
class Text:
    """Where one conversation lies in the store, whole.

    Attributes:
        shard: Its shard.
        start: Its first row there.
        length: Its rows.
    """

    shard: int
    start: int
    length: int


class StateStore:
    """Memory-mapped shards of one split; rows are numbered through all shards.

    Args:
        output: Folder of the run, whose data and states are finished.
        split: `train` or `held_out`.
        num_heads: K of the heads that are to learn from it.
        teacher: Whether the target's likeliest tokens, which the teacher stage left, belong to a batch.
        folder: Where the states are; None is `states/` in `output`.

    Raises:
        CheckpointError: If a shard is missing or has another number of rows than the manifest says.
    """

    def __init__(
        self, output: Path, split: str, num_heads: int, *, teacher: bool = False, folder: Path | None = None
    ) -> None:
        folder = output / "states" if folder is None else folder
        manifest = read_json(folder / "manifest.json")
        self.hidden_size: int = manifest["hidden_size"]
        self.whole: bool = manifest["whole"]
        self.taps: tuple[int, ...] = tuple(manifest["taps"])
        self.num_heads = num_heads
        self.h: list[torch.Tensor] = []
        self.layers: list[torch.Tensor] = []
        self.conversations: list[torch.Tensor] = []
        self.positions: list[torch.Tensor] = []
        for number, rows in enumerate(manifest["splits"][split]):
            shard = read_shard(shard_path(folder, split, number))
            if len(shard["h"]) != rows:
                raise CheckpointError(
                    f"{shard_path(folder, split, number)} must hold {rows} positions as the manifest says, got "
                    f"{len(shard['h'])}; run the states stage again"
                )
            self.h.append(shard["h"])
            self.conversations.append(shard["conversation"])
            self.positions.append(shard["position"])
            if self.taps:
                self.layers.append(shard["layers"])
        self.starts = torch.cumsum(torch.tensor([0, *map(len, self.h)]), 0)
        self.teacher: TeacherShards | None = None
        if teacher:
            paths = [shard_path(output / "teacher", split, number) for number in range(len(self.h))]
            self.teacher = TeacherShards(paths, [len(h) for h in self.h], whole=self.whole)
        data = list(TokenData(output / "data", split))
        self._ids = torch.cat([conversation.input_ids for conversation in data])
        self._mask = torch.cat([conversation.mask for conversation in data])
        self._offsets = torch.cumsum(torch.tensor([0, *(len(conversation.input_ids) for conversation in data)]), 0)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def rows(self, numbers: torch.Tensor) -> StateRows:
        """The rows `numbers` (int64 [T]), in that order."""
        h = self.h[0].new_empty(len(numbers), self.hidden_size)
        for shard, places, local in self._by_shard(numbers):
            h[places] = self.h[shard][local]
        answers = self.answers(numbers)
        return StateRows(h=h, targets=answers.pop("targets"), teacher=answers)

    def answers(self, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        """What there is to learn at rows, without their states: `targets`, and `teacher` of `StateRows`."""
        found = {"targets": torch.empty(len(numbers), self.num_heads + 1, dtype=torch.int32)}
        for shard, places, local in self._by_shard(numbers):
            targets = self.targets(self.conversations[shard][local], self.positions[shard][local])
            for name, column in {"targets": targets, **self._taught(shard, local, targets)}.items():
                if name not in found:
                    found[name] = column.new_empty(len(numbers), *column.shape[1:])
                found[name][places] = column
        return found

    def _by_shard(self, numbers: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Shards that hold some of the rows, the places of these in `numbers`, and their rows there."""
        shards = torch.bucketize(numbers, self.starts[1:], right=True)
        for shard in shards.unique().tolist():
            places = (shards == shard).nonzero().flatten()
            yield shard, places, numbers[places] - self.starts[shard]

    def _taught(self, shard: int, rows: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {} if self.teacher is None else self.teacher.rows(shard, rows, targets)

    def where(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Conversations and positions of the rows `numbers`: both int32 [T]."""
        found = torch.empty(2, len(numbers), dtype=torch.int32)
        for shard, places, local in self._by_shard(numbers):
            found[0, places], found[1, places] = self.conversations[shard][local], self.positions[shard][local]
        return found[0], found[1]

    def targets(self, conversations: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the target chose after positions, and after that; see `make_targets`.

        Args:
            conversations: Int [T], their numbers.
            positions: Int [T], places in them.

        Returns:
            Int32 [T, K + 1].
        """
        places, inside = self._following(conversations, positions)
        return torch.where(inside & self._mask[places], self._ids[places], UNTRAINED)

    def tokens(self, conversations: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Int64 [T, K]: the tokens t + 1 … t + K as they stand in the text, answers or not; 0 behind its end."""
        places, inside = self._following(conversations, positions)
        return torch.where(inside, self._ids[places], 0)[:, :-1].to(torch.int64)

    def _following(self, conversations: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = conversations.to(torch.int64)
        starts, ends = self._offsets[numbers], self._offsets[numbers + 1]
        return _after(starts + positions, ends, self.num_heads + 1)

    def decoding_rows(self) -> torch.Tensor:
        """Int64 row numbers at which decoding would draft: the token after them was the target's choice."""
        chosen = [
            self.targets(conversations, positions)[:, 0] != UNTRAINED
            for conversations, positions in zip(self.conversations, self.positions, strict=True)
        ]
        return torch.cat(chosen).nonzero().flatten()

    def texts(self) -> list[Text]:
        """The conversations of a store of whole texts, in the order of their rows."""
        assert self.whole, "a store of answers alone holds no texts"
        found = []
        for shard, conversations in enumerate(self.conversations):
            counts = torch.unique_consecutive(conversations, return_counts=True)[1]
            ends = counts.cumsum(0)
            pairs = zip((ends - counts).tolist(), counts.tolist(), strict=True)
            found += [Text(shard=shard, start=start, length=count) for start, count in pairs]
        return found

    def batch(self, texts: list[Text]) -> dict[str, torch.Tensor]:
        """Texts side by side, shorter ones filled up on the right: their rows there count for nothing.

        Returns:
            `h` [B, T, H], `targets` int32 [B, T, K + 1], `tokens` int64 [B, T, K], and where the store has them
            `layers` [B, T, L, H], `teacher_ids` and `teacher_probs` [B, T, K, k].
        """
        columns: dict[str, list[torch.Tensor]] = {}
        for text in texts:
            rows = slice(text.start, text.start + text.length)
            where = self.conversations[text.shard][rows], self.positions[text.shard][rows]
            found = {"h": self.h[text.shard][rows], "targets": self.targets(*where), "tokens": self.tokens(*where)}
            if self.taps:
                found["layers"] = self.layers[text.shard][rows]
            found |= self._taught(text.shard, torch.arange(rows.start, rows.stop), found["targets"])
            for name, tensor in found.items():
                columns.setdefault(name, []).append(tensor)
        filling = {"targets": UNTRAINED}
        pad = torch.nn.utils.rnn.pad_sequence
        return {name: pad(parts, True, filling.get(name, 0)) for name, parts in columns.items()}


def shard_path(folder: Path, split: str, number: int) -> Path:
    """Where a shard lies."""
    return folder / f"{split}-{number:05d}.safetensors"


def write_shard(path: Path, columns: dict[str, torch.Tensor]) -> None:
    """Writes one shard, whole or not at all.

    Args:
        path: Its place.
        columns: `h` [T, H]; `conversation` int32 [T], number of the conversation in the split's token data; `position`
            int32 [T], position in it; and `layers` [T, L, H] where some are tapped.
    """
    write_tensors(path, {name: column.contiguous() for name, column in columns.items()})


def read_shard(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a shard as views of the mapped file.

    Raises:
        CheckpointError: If it is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
            return {**{key: found[key] for key in COLUMNS}, **found}
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({error}); run the states stage again") from error
