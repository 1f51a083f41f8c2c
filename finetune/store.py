"""The hidden-state store: h of the target at the positions heads learn from. Knows tensors, not the model."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from medusa_spec.errors import CheckpointError
from medusa_spec.files import read_json, write_tensors

UNTRAINED = -100


def make_targets(input_ids: torch.Tensor, mask: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What the target chose after each position, and after that.

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
    length = len(input_ids)
    labels = torch.where(mask, input_ids.to(torch.int32), UNTRAINED)
    padded = torch.cat([labels, labels.new_full((num_heads + 2,), UNTRAINED)])
    return torch.stack([padded[1 + j : 1 + j + length] for j in range(num_heads + 1)], dim=1).to(torch.int32)


def wanted_positions(targets: torch.Tensor) -> torch.Tensor:
    """Int64 positions at which at least one head has a target, from targets [T, K + 1]."""
    return (targets[:, 1:] != UNTRAINED).any(dim=1).nonzero().flatten()


@dataclass(frozen=True, kw_only=True)
class StateRows:
    """Rows of the store.

    Attributes:
        h: [T, H].
        targets: Int32 [T, K + 1], see `make_targets`.
    """

    h: torch.Tensor
    targets: torch.Tensor


class StateStore:
    """Memory-mapped shards of one split; rows are numbered through all shards.

    Raises:
        CheckpointError: If a shard is missing or has another number of rows than the manifest says.
    """

    def __init__(self, folder: Path, split: str) -> None:
        manifest = read_json(folder / "manifest.json")
        self.hidden_size: int = manifest["hidden_size"]
        self.num_heads: int = manifest["num_heads"]
        self.h: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []
        self.conversations: list[torch.Tensor] = []
        for number, rows in enumerate(manifest["splits"][split]):
            shard = read_shard(shard_path(folder, split, number))
            if len(shard["h"]) != rows:
                raise CheckpointError(
                    f"{shard_path(folder, split, number)} must hold {rows} positions as the manifest says, got "
                    f"{len(shard['h'])}; run the states stage again"
                )
            self.h.append(shard["h"])
            self.targets.append(shard["targets"])
            self.conversations.append(shard["conversation"])
        self.starts = torch.cumsum(torch.tensor([0, *map(len, self.h)]), 0)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def rows(self, numbers: torch.Tensor) -> StateRows:
        """The rows `numbers` (int64 [T]), in that order."""
        shards = torch.bucketize(numbers, self.starts[1:], right=True)
        h = self.h[0].new_empty(len(numbers), self.hidden_size)
        targets = torch.empty(len(numbers), self.num_heads + 1, dtype=torch.int32)
        for shard in shards.unique().tolist():
            places = (shards == shard).nonzero().flatten()
            local = numbers[places] - self.starts[shard]
            h[places], targets[places] = self.h[shard][local], self.targets[shard][local]
        return StateRows(h=h, targets=targets)


def shard_path(folder: Path, split: str, number: int) -> Path:
    """Where a shard lies."""
    return folder / f"{split}-{number:05d}.safetensors"


def write_shard(
    path: Path, h: torch.Tensor, targets: torch.Tensor, conversation: torch.Tensor, position: torch.Tensor
) -> None:
    """Writes one shard, whole or not at all.

    Args:
        path: Its place.
        h: [T, H].
        targets: Int32 [T, K + 1].
        conversation: Int32 [T], number of the conversation in the split's token data.
        position: Int32 [T], position in it.
    """
    tensors = {"h": h, "targets": targets, "conversation": conversation, "position": position}
    write_tensors(path, {key: value.contiguous() for key, value in tensors.items()})


def read_shard(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a shard as views of the mapped file.

    Raises:
        CheckpointError: If it is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in ("h", "targets", "conversation", "position")}
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({error}); run the states stage again") from error
