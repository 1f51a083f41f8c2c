"""Ranks of the true tokens among the heads' guesses, on stored states: what accuracy and trees are counted from."""

import torch

from medusa_spec.finetune.losses import CHUNK_ELEMENTS
from medusa_spec.finetune.store import UNTRAINED, StateStore
from medusa_spec.finetune.trained import TrainedHeads


def rank_of(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rank of the true token, 0 for the first guess; equal logits are guessed in order of their index.

    ```
    logits [.1 .9 .3 .9], index 3 -> 1 (one equal logit stands before it);  index -1 -> -1
    ```

    Args:
        logits: [T, V or draft vocabulary].
        index: Int64 [T], -1 where the truth cannot be guessed.

    Returns:
        Int64 [T].
    """
    truth = logits.gather(1, index.clamp_min(0)[:, None])
    before = torch.arange(logits.shape[1], device=logits.device)[None] < index[:, None]
    rank = ((logits > truth) | ((logits == truth) & before)).sum(1)
    return torch.where(index >= 0, rank, -1)


def decoding_rows(store: StateStore) -> torch.Tensor:
    """Int64 row numbers at which decoding would draft: the token after them was the target's choice."""
    roots = torch.cat([targets[:, 0] for targets in store.targets])
    return (roots != UNTRAINED).nonzero().flatten()


def complete_rows(store: StateStore) -> torch.Tensor:
    """Those of `decoding_rows` at which every head has a target: at the end of an answer there is nothing to be right
    about. If there are none, all of `decoding_rows`."""
    every = torch.cat([(targets != UNTRAINED).all(1) for targets in store.targets])
    complete = every.nonzero().flatten()
    return complete if len(complete) else decoding_rows(store)


@torch.no_grad()
def measure_ranks(model: TrainedHeads, store: StateStore, rows: torch.Tensor) -> torch.Tensor:
    """Ranks at the given rows of the store.

    Returns:
        Int64 [T, K]; -1 where the truth lies outside the draft vocabulary.
    """
    projection = model.heads.projection
    device = projection.weight.device
    size = max(1, min(2048, CHUNK_ELEMENTS // projection.weight.shape[0]))
    result = []
    for start in range(0, len(rows), size):
        batch = store.rows(rows[start : start + size])
        h = batch.h.to(device, model.weights.dtype)
        indices = model.indices(batch.targets.to(device))
        columns = []
        for k, z in enumerate(model.features(h, batch.targets.to(device))):
            logits = model.heads.head(k).logits(z, projection)
            columns.append(rank_of(logits, indices[:, k]))
        result.append(torch.stack(columns, dim=1).cpu())
    return torch.cat(result)


def accuracy(ranks: torch.Tensor, top: int) -> list[float]:
    """Share of positions, per head, at which the truth is among the first `top` guesses."""
    return ((ranks >= 0) & (ranks < top)).float().mean(0).tolist()
