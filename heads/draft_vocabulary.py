"""The draft vocabulary: the tokens that heads may guess. Knows ids and counts, not text."""

from collections.abc import Iterable

import torch


def most_frequent(counts: torch.Tensor, size: int, *, always: Iterable[int] = ()) -> torch.Tensor:
    """The `size` most frequent token ids, in rising order of id.

    A head that can only guess common tokens costs a fraction of one over the whole vocabulary, and loses only the
    acceptance of rare ones: whatever it guesses, the target still decides.

    Args:
        counts: Int tensor [V], how often each id was an answer token; ties go to the lower id.
        size: Number of ids wanted, at most V.
        always: Ids that must be in, such as the end-of-sequence ids, however rare.

    Returns:
        Int64 tensor [size], rising.
    """
    if not 1 <= size <= counts.numel():
        raise ValueError(f"size must be in 1..{counts.numel()} (the vocabulary), got {size}")
    boosted = counts.clone().to(torch.long)
    required = sorted(set(always))
    if len(required) > size:
        raise ValueError(f"size must be at least {len(required)}, the number of ids in always, got {size}")
    if required:
        boosted[required] = torch.iinfo(torch.long).max
    order = torch.argsort(boosted, descending=True, stable=True)[:size]
    return torch.sort(order).values


def coverage(counts: torch.Tensor, ids: torch.Tensor) -> float:
    """Share of the counted tokens [V] that the draft vocabulary `ids` holds, 0 to 1."""
    total = int(counts.sum())
    return float(counts[ids].sum()) / total if total else 0.0


def index_of(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Inverse map of the draft vocabulary.

    Returns:
        Int64 tensor [V]: place of each token id in `ids`, -1 where it is not a draft token.
    """
    inverse = torch.full((vocab_size,), -1, dtype=torch.long)
    inverse[ids] = torch.arange(ids.numel())
    return inverse
