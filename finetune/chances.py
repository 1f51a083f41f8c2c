"""How far a draft's probabilities can be trusted, on stored states: what trees that grow are calibrated by."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from medusa_spec.finetune.ranks import draft_logits
from medusa_spec.finetune.trained import TrainedHeads

TEMPERATURES = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5)
"""Tried; the likelihood is flat between them."""


@dataclass(frozen=True, kw_only=True)
class Chances:
    """Calibration of a draft's probabilities.

    Attributes:
        temperature: By which logits are divided so that the truth is likeliest, over all heads.
        coverage: Share of the truths that are in the draft vocabulary.
        hit: Share at which the first guess below right ones is right: the mean of the heads after the first, or the
            first one's where there is only one.
    """

    temperature: float
    coverage: float
    hit: float


@torch.no_grad()
def measure_chances(model: TrainedHeads, batches: Iterable[Mapping[str, torch.Tensor]], limit: int) -> Chances:
    """Measures them at no more than about `limit` positions.

    Args:
        model: The heads.
        batches: As the model takes them.
        limit: Positions after which no further batch is read.
    """
    surprise = torch.zeros(len(TEMPERATURES), dtype=torch.float64)
    hits, counts = (torch.zeros(model.heads.config.num_heads) for _ in range(2))
    inside = total = seen = 0
    for batch in batches:
        known = _has_target(model, batch)
        for k, logits, index in draft_logits(model, batch):
            rows = index >= 0
            inside += int(rows.sum())
            hits[k] += int((logits.argmax(1) == index)[rows].sum())
            kept, truth = logits[rows].float(), index[rows, None]
            for place, temperature in enumerate(TEMPERATURES):
                scaled = kept / temperature
                surprise[place] += float((scaled.logsumexp(1) - scaled.gather(1, truth)[:, 0]).sum())
        counts += known.sum(0)
        total += int(known.sum())
        seen += len(known)
        if seen >= limit:
            break
    rates = hits / counts.clamp_min(1)
    return Chances(
        temperature=TEMPERATURES[int(surprise.argmin())],
        coverage=max(inside / max(total, 1), 1e-3),
        hit=min(max(float(rates[1:].mean() if len(rates) > 1 else rates[0]), 1e-3), 1.0),
    )


def _has_target(model: TrainedHeads, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Bool [T, K]: at the positions that decoding would draft from, whether a head has anything to be right about."""
    targets = batch["targets"].flatten(0, -2).cpu()
    known = targets[targets[:, 0] >= 0] >= 0
    return (known if not model.heads.sequential else known.cummin(dim=1).values)[:, 1:]
