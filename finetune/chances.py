"""How far a draft's probabilities can be trusted, on stored states: what trees that grow are calibrated by."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from medusa_spec.finetune.ranks import draft_logits, rank_of
from medusa_spec.finetune.trained import TrainedHeads

TEMPERATURES = (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5)
"""Tried; the likelihood is flat between them."""


@dataclass(frozen=True, kw_only=True)
class Chances:
    """Calibration of a draft's probabilities: of a guess, given that those before it are right.

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
def measure_chances(
    model: TrainedHeads, batches: Iterable[Mapping[str, torch.Tensor]], width: int | None = None
) -> Chances:
    """Measures them.

    Sequential heads are given the true tokens before. The others do not see what was drafted, and are surer where the
    guesses before were right than elsewhere: a head of theirs counts where all before it had the truth among their
    guesses, since only there has a tree nodes for it.

    Args:
        model: The heads.
        batches: As the model takes them.
        width: Guesses of a head that trees take, of heads that are not sequential; None counts every position.
    """
    heads = model.heads.config.num_heads
    surprise = torch.zeros(len(TEMPERATURES), dtype=torch.float64)
    hits, inside, total = (torch.zeros(heads) for _ in range(3))
    for batch in batches:
        known = _has_target(model, batch)
        reached, place, last = torch.ones(len(known), dtype=torch.bool), 0, 0
        for k, logits, index in draft_logits(model, batch):
            place = place if k == last else 0
            rows = slice(place, place + len(index))
            place, last = rows.stop, k
            ranks, above = rank_of(logits, index).cpu(), reached[rows].clone()
            total[k] += int((known[rows, k] & above).sum())
            inside[k] += int(((ranks >= 0) & above).sum())
            hits[k] += int(((ranks == 0) & above).sum())
            surprise += _surprise(logits, index, ((ranks >= 0) & above).to(index.device))
            if width is not None and not model.heads.sequential:
                reached[rows] &= (ranks >= 0) & (ranks < width)
    rates = hits / total.clamp_min(1)
    return Chances(
        temperature=TEMPERATURES[int(surprise.argmin())],
        coverage=max(float(inside.sum() / total.sum().clamp_min(1)), 1e-3),
        hit=min(max(float(rates[1:].mean() if heads > 1 else rates[0]), 1e-3), 1.0),
    )


def _surprise(logits: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Sum of -log of the truths' chances in these rows, at every temperature tried."""
    kept, truth = logits[rows].float(), index[rows, None]
    right = kept.gather(1, truth)[:, 0]
    # One at a time: a copy of the logits for every temperature would not fit.
    sums = [float(((kept / each).logsumexp(1) - right / each).sum()) for each in TEMPERATURES]
    return torch.tensor(sums, dtype=torch.float64)


def _has_target(model: TrainedHeads, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Bool [T, K]: at the positions that decoding would draft from, whether a head has anything to be right about."""
    targets = batch["targets"].flatten(0, -2).cpu()
    known = targets[targets[:, 0] >= 0] >= 0
    return (known if not model.heads.sequential else known.cummin(dim=1).values)[:, 1:]
