"""Ranks of the true tokens among the heads' guesses, on stored states: what accuracy and trees are counted from."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from medusa_spec.finetune.losses import CHUNK_ELEMENTS
from medusa_spec.finetune.store import UNTRAINED
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


@torch.no_grad()
def measure_ranks(model: TrainedHeads, batches: Iterable[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Ranks at the positions at which every head has a target: at the end of an answer there is nothing to be right
    about. If there are none, at all positions at which decoding would draft.

    Args:
        model: The heads.
        batches: As the model takes them.

    Returns:
        Int64 [T, K]; -1 where the truth lies outside the draft vocabulary.
    """
    complete, others = [], []
    for batch in batches:
        ranks, targets = _ranks(model, batch)
        known = targets != UNTRAINED
        complete.append(ranks[known.all(1)])
        others.append(ranks[known[:, 0]])
    result = torch.cat(complete)
    return result if len(result) else torch.cat(others)


def _ranks(model: TrainedHeads, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks [T, K] and targets [T, K + 1] at all positions of a batch that decoding would draft from."""
    columns: list[list[torch.Tensor]] = [[] for _ in range(model.heads.config.num_heads)]
    for k, logits, index in draft_logits(model, batch):
        columns[k].append(rank_of(logits, index).cpu())
    targets = batch["targets"].flatten(0, -2)
    return torch.stack([torch.cat(parts) for parts in columns], dim=1), targets[targets[:, 0] != UNTRAINED].cpu()


def draft_logits(
    model: TrainedHeads, batch: Mapping[str, torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Draft logits at all positions of a batch that decoding would draft from, given the true tokens before.

    Returns:
        Head by head, pieces of (k, logits [T, draft vocabulary], index int64 [T] of the truth, -1 where it has none).
    """
    projection = model.heads.projection
    moved: dict[str, Any] = {name: tensor.to(projection.weight.device) for name, tensor in batch.items()}
    targets = moved["targets"].flatten(0, -2)
    rows = (targets[:, 0] != UNTRAINED).nonzero().flatten()
    indices = model.indices(targets[rows])
    size = max(1, CHUNK_ELEMENTS // projection.weight.shape[0])
    read = {name: tensor for name, tensor in moved.items() if not name.startswith("teacher")}
    for k, z in enumerate(model.features(**read)):
        for part, index in zip(z.flatten(0, -2)[rows].split(size), indices[:, k].split(size), strict=True):
            yield k, model.heads.head(k).logits(part, projection), index


def accuracy(ranks: torch.Tensor, top: int) -> list[float]:
    """Share of positions, per head, at which the truth is among the first `top` guesses."""
    return ((ranks >= 0) & (ranks < top)).float().mean(0).tolist()
