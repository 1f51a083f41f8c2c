"""The target's likeliest tokens beside the stored states, memory-mapped. Knows rows and files, not how they came."""

from pathlib import Path

import torch
from safetensors import safe_open

from medusa_spec.errors import CheckpointError
from medusa_spec.files import write_tensors

STORED_DTYPE = torch.float16
"""Of log-probabilities: the likely ones are near zero, where floats are fine. A half is kept to 0.02 %, a thousandth to
0.2 %; logits of 20 would be off by 0.8 %, in bfloat16 by 6 %."""


def write_teacher_shard(path: Path, ids: torch.Tensor, log_probs: torch.Tensor) -> None:
    """Writes one shard, whole or not at all.

    Args:
        path: Its place.
        ids: Int [T, k], the likeliest tokens at the rows of the states' shard.
        log_probs: [T, k], logarithms of their probabilities over all V.
    """
    columns = {"ids": ids.to(torch.int32), "log_probs": log_probs.to(STORED_DTYPE)}
    write_tensors(path, {name: column.cpu().contiguous() for name, column in columns.items()})


def read_teacher_shard(path: Path, rows: int) -> dict[str, torch.Tensor]:
    """`ids` and `log_probs` as views of the mapped file.

    Raises:
        CheckpointError: If it is missing or damaged, or is not beside as many states.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in ("ids", "log_probs")}
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({error}); run the teacher stage again") from error
    if len(found["ids"]) != rows:
        raise CheckpointError(
            f"{path} must hold {rows} positions as the states beside it do, got {len(found['ids'])}; run the teacher "
            "stage again"
        )
    return found


class TeacherShards:
    """What the target would have said where heads guess.

    ```
    answers alone, K = 2      row   token t + 1   head 0 learns from row   head 1 learns from row
                              0     5             1                        2
                              1     6             2                        none: the answer ends
                              2     7             none                     none
    ```

    Args:
        paths: Of the shards, in order.
        sizes: Rows of each.
        whole: Whether the rows of a text are all its positions, or those after which the target chose.
    """

    def __init__(self, paths: list[Path], sizes: list[int], *, whole: bool) -> None:
        self._shards = [read_teacher_shard(path, rows) for path, rows in zip(paths, sizes, strict=True)]
        self._whole = whole

    @property
    def count(self) -> int:
        """k."""
        return int(self._shards[0]["ids"].shape[1])

    def rows(self, shard: int, rows: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """The distributions that the tokens of heads were chosen from: head k's at position t + 1 + k.

        That row is kept if the token after it is an answer, which is what makes it head k's target.

        Args:
            shard: Its number.
            rows: Int64 [T], rows in it.
            targets: Int [T, K + 1], theirs; see `StateStore.targets`.

        Returns:
            `teacher_ids` int32 [T, K, k]; `teacher_probs` float32 [T, K, k], zero where a head has no target.
        """
        known = targets[:, 1:] >= 0
        steps = torch.arange(1, targets.shape[1]).expand_as(known) if self._whole else known.cumsum(1)
        places = torch.where(known, rows[:, None] + steps, 0)
        probs = self._shards[shard]["log_probs"][places].float().exp()
        return {"teacher_ids": self._shards[shard]["ids"][places], "teacher_probs": probs * known[..., None]}
