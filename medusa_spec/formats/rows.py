"""What the rows of foreign LM heads stand for: all tokens, or those of a token map. Knows no heads."""

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
        vocab_size: V.
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
        CheckpointError: If its token map is no list of different ids below V.
    """
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
    said = contents.config.get("truncated_vocab_size")
    if said is not None and said != len(ids):
        warnings.warn(
            f"{contents.folder}: the config says truncated_vocab_size = {said}, {layout.token_map} holds {len(ids)} "
            "ids; the tensor is believed",
            stacklevel=2,
        )
    return Rows(ids=ids.long(), order=order, vocab_size=vocab_size)
