"""What the rows of foreign LM heads stand for: all tokens, those of a map, or of offsets. Knows no heads."""

import warnings
from dataclasses import dataclass

import torch

from medusa_spec.errors import CheckpointError
from medusa_spec.formats.contents import Contents
from medusa_spec.formats.layout import Layout


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """What the rows of the foreign LM heads stand for.

    Attributes:
        ids: Target ids of the draft vocabulary, rising; None for all V.
        order: For each of those its row in an LM head cut to the draft vocabulary.
        vocab_size: Rows of an LM head that is not cut.
    """

    ids: torch.Tensor | None
    order: torch.Tensor | None
    vocab_size: int

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """An LM head's rows or biases [V or draft vocabulary, …] in rising order of the target's ids."""
        if self.ids is None or self.order is None or len(weight) not in (len(self.ids), self.vocab_size):
            return weight  # whose shape is checked later
        return weight[self.order] if len(weight) == len(self.ids) else weight[self.ids]


def read_rows(contents: Contents, layout: Layout, vocab_size: int) -> Rows:
    """The rows of a checkpoint for a target of V tokens.

    Raises:
        CheckpointError: If its token map is no list of different ids below V, or its offsets lead to none.
    """
    if layout.offsets is not None:
        return _of_offsets(contents, *layout.offsets, vocab_size)
    if layout.token_map is None:
        return Rows(ids=None, order=None, vocab_size=vocab_size)
    found = contents.read([layout.token_map])[layout.token_map]
    ids, order = found.flatten().sort()
    if found.is_floating_point() or found.dim() != 1 or not found.numel() or not 0 <= ids[0] <= ids[-1] < vocab_size:
        span = f" in {ids[0]}..{ids[-1]}" if found.numel() else ""
        raise CheckpointError(
            f"{contents.folder}: {layout.token_map} must be ids in 0..{vocab_size - 1}, the target's vocabulary, got "
            f"shape {tuple(found.shape)} of {found.dtype}{span}"
        )
    if not (ids.diff() > 0).all():
        raise CheckpointError(
            f"{contents.folder}: {layout.token_map} must name each id once, got {len(ids)} ids, of which "
            f"{len(ids.unique())} are different"
        )
    _compare_size(contents, "truncated_vocab_size", layout.token_map, len(ids))
    return Rows(ids=ids.long(), order=order, vocab_size=vocab_size)


def _of_offsets(contents: Contents, offsets: str, table: str | None, vocab_size: int) -> Rows:
    """Rows in rising order of ids: row r stands for r plus its offset."""
    found = contents.read([offsets])[offsets]
    numbers = torch.int32, torch.int64
    if found.dtype not in numbers or found.dim() != 1 or not found.numel():
        raise CheckpointError(
            f"{contents.folder}: {offsets} must hold an int64 for each row of the LM head, got shape "
            f"{tuple(found.shape)} of {found.dtype}"
        )
    ids = found.long() + torch.arange(len(found))
    if ids.min() < 0 or ids.max() >= vocab_size or not (ids.diff() > 0).all():
        raise CheckpointError(
            f"{contents.folder}: {offsets} plus 0..{len(ids) - 1} must be rising ids in 0..{vocab_size - 1}, the "
            f"target's vocabulary, got {len(ids.unique())} different ones in {ids.min()}..{ids.max()}; the heads are "
            "for another model, or damaged"
        )
    if table is not None:
        _check_table(contents, table, ids, offsets, vocab_size)
    _compare_size(contents, "draft_vocab_size", offsets, len(ids))
    if len(ids) == vocab_size:
        return Rows(ids=None, order=None, vocab_size=vocab_size)
    return Rows(ids=ids, order=torch.arange(len(ids)), vocab_size=len(ids))


def _check_table(contents: Contents, table: str, ids: torch.Tensor, offsets: str, vocab_size: int) -> None:
    """The table of the ids that have a row says the same."""
    found = contents.read([table])[table]
    if tuple(found.shape) != (vocab_size,):
        raise CheckpointError(
            f"{contents.folder}: {table} must have shape {(vocab_size,)}, the target's vocabulary, got "
            f"{tuple(found.shape)}; the heads are for another model"
        )
    marked = found.nonzero().flatten()
    if not torch.equal(marked, ids):
        raise CheckpointError(
            f"{contents.folder}: {table} must mark the {len(ids)} ids that {offsets} leads to, it marks {len(marked)}, "
            f"of which {int(torch.isin(marked, ids).sum())} are those; the checkpoint is damaged"
        )


def _compare_size(contents: Contents, key: str, tensor: str, size: int) -> None:
    said = contents.config.get(key)
    if said is not None and said != size:
        warnings.warn(
            f"{contents.folder}: the config says {key} = {said}, {tensor} holds {size} ids; the tensor is believed",
            stacklevel=2,
        )
