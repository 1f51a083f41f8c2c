"""How near the heads' probabilities are to the target's, on stored states: what sampled drafts would be accepted."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from medusa_spec.finetune.trained import TrainedHeads


@torch.no_grad()
def measure_overlap(model: TrainedHeads, batches: Iterable[Mapping[str, torch.Tensor]]) -> list[float]:
    """The mean of the sum of min(p, q), by head: the share of draws from the heads, at temperature 1 and all before
    them right, that rejection sampling accepts.

    p is known at the kept tokens alone, so each figure is a lower bound; what is missing is less than the mass that the
    teacher stage found to be left out.

    Args:
        model: The heads.
        batches: As the model takes them, with the target's likeliest tokens.
    """
    heads = model.heads.config.num_heads
    sums, counts = torch.zeros(heads, dtype=torch.float64), torch.zeros(heads, dtype=torch.float64)
    for batch in batches:
        moved: dict[str, Any] = {name: part.to(model.weights.device) for name, part in batch.items()}
        ids, probs = moved.pop("teacher_ids"), moved.pop("teacher_probs")
        known = model.known(moved["targets"]) & (moved["targets"][..., :1] >= 0)
        for k, z in enumerate(model.features(**moved)):
            here = int(known[..., k].sum())
            loss = model.taught("total_variation", k, z, ids[..., k, :], probs[..., k, :], known[..., k])
            sums[k] += here * (1 - float(loss))
            counts[k] += here
    return (sums / counts.clamp_min(1)).tolist()
