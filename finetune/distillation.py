"""Losses against the target's own probabilities, in pieces that fit the memory. Knows no model and no files."""

import math
from collections.abc import Callable
from typing import Any

import torch

from medusa_spec.finetune.losses import CHUNK_ELEMENTS, finished_logits

LK_DECAY = 3.0
"""How fast `lk` moves from the divergence to the acceptance rate as the heads get better: η of the paper."""

LEAST = 1e-10
"""Smaller slopes are none, and less likely tokens than `LEAST` squared count as that likely in gradients. A head that
is sure of the wrong token would otherwise fill them with products below the least normal float, with which a CPU
computes ten times slower."""

Term = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(log q [T, k], p [T, k], m [T, 1]) to the values [T], weights in them, and their slopes by log q [T, k]."""


def _kl(log_q: torch.Tensor, p: torch.Tensor, mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.xlogy(p, p / mass.clamp_min(torch.finfo(p.dtype).tiny)) - p * log_q).sum(1), -p


def _variation(log_q: torch.Tensor, p: torch.Tensor, mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q = log_q.exp()
    return 1 - torch.minimum(p, q).sum(1), torch.where(q < p, -q, 0)


def _log_acceptance(log_q: torch.Tensor, p: torch.Tensor, mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = p.log()
    log_alpha = torch.minimum(log_p, log_q).logsumexp(1, keepdim=True)  # α itself may be less than the least float
    some = mass > 0
    values = torch.where(some, mass * (mass.log() - log_alpha), 0)[:, 0]
    return values, torch.where((log_q < log_p) & some, -mass * (log_q - log_alpha).exp(), 0)


TERMS: dict[str, tuple[Term, ...]] = {
    "kl": (_kl,),
    "total_variation": (_variation,),
    "log_acceptance": (_log_acceptance,),
    "lk": (_kl, _variation),
}
"""What each loss is put together from."""


class _LinearDistillation(torch.autograd.Function):
    """Sums over the positions of terms of log softmax(finish(z W^T + b)) at k rows each, gradients computed on the way.

    With slopes a by log q at those rows, the gradient by the logits is a there, less the sum of a times softmax.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        index: torch.Tensor,
        p: torch.Tensor,
        terms: tuple[Term, ...],
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        count, needs_weight = len(terms), ctx.needs_input_grad[1]
        grad_z = z.new_empty(count, *z.shape)
        grad_weight = weight.new_zeros(count, *weight.shape) if needs_weight else None
        grad_bias = bias.new_zeros(count, *bias.shape) if bias is not None else None
        totals = z.new_zeros(count)
        rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
        for start in range(0, len(z), rows):
            piece = slice(start, start + rows)
            logits, slope = finished_logits(z[piece], weight, bias, scale, softcap)
            lse = logits.logsumexp(dim=1, keepdim=True)
            log_q = logits.gather(1, index[piece]) - lse
            softmax = logits.sub_(lse).clamp_min_(2 * math.log(LEAST)).exp_()
            for place, term in enumerate(terms):
                values, slopes = term(log_q, p[piece], p[piece].sum(1, keepdim=True))
                totals[place] += values.sum()
                slopes = torch.where(slopes.abs() < LEAST, 0, slopes)
                last = place == count - 1  # the chunk's memory is used again by the last one
                grad = (softmax.mul_ if last else softmax.mul)(-slopes.sum(1, keepdim=True))
                grad.scatter_add_(1, index[piece], slopes)
                if slope is not None:
                    grad *= slope
                if scale != 1.0:
                    grad *= scale
                grad_z[place, piece] = grad @ weight
                if grad_weight is not None:
                    grad_weight[place].addmm_(grad.T, z[piece])
                if grad_bias is not None:
                    grad_bias[place] += grad.sum(0)
        ctx.save_for_backward(grad_z, grad_weight, grad_bias)
        return totals

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Any, ...]:
        grads = (None if grad is None else torch.einsum("c,c...->...", upstream[0], grad) for grad in ctx.saved_tensors)
        return (*grads, None, None, None, None, None)


def linear_distillation(
    loss: str,
    z: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    index: torch.Tensor,
    probs: torch.Tensor,
    known: torch.Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """A loss of an LM head against the target's probabilities, without ever holding all logits.

    The target's distribution p is known at its likeliest tokens alone. S are those of them that the heads can guess,
    m their mass (the sum of p over S), q the heads' probabilities over the draft vocabulary. What is left of p, beyond
    the likeliest tokens or outside the draft vocabulary, is claimed by nobody: no head is pulled towards it, and a
    position at which it is large says little, so it weighs little.

    | loss              | of a position                                           | weight in the mean |
    |-------------------|---------------------------------------------------------|--------------------|
    | `kl`              | KL divergence of q from p / m, over S                   | m                  |
    | `total_variation` | 1 - α, where α is the sum over S of min(p, q)           | 1                  |
    | `log_acceptance`  | -log(α / m)                                             | m                  |
    | `lk`              | λ kl + (1 - λ) total_variation, with λ = exp(-3 mean α) | as those           |

    α is the share of draws from q that rejection sampling accepts, short of what S leaves out. Where p is one token
    alone, `kl` and `log_acceptance` are the cross-entropy. The last two are those of "LK Losses: Direct Acceptance Rate
    Optimization for Speculative Decoding" (Samarin et al. 2026, arXiv 2602.23881), whose best setting, 3, is
    `LK_DECAY`; λ is one number for all positions of a head in a step, and no gradient runs through it.

    Args:
        loss: Name in `TERMS`.
        z: Features [T, H], float32 or float64.
        weight: LM head [V or draft vocabulary, H].
        bias: Its biases, or None.
        index: Int64 [T, k], rows in `weight` of the target's likeliest tokens; negative where the heads cannot guess
            one.
        probs: [T, k], their probabilities; no token is named twice.
        known: Bool [T], positions that count.
        scale: See `Projection`.
        softcap: See `Projection`.

    Returns:
        A scalar; zero, with a zero gradient, if no position counts.
    """
    terms = TERMS[loss]
    places = known.nonzero().flatten()
    if len(places) == 0:
        return z.sum() * 0.0
    p = torch.where(index >= 0, probs.to(z.dtype), 0)[places]
    totals = _LinearDistillation.apply(
        z if len(places) == len(z) else z[places],
        weight,
        bias,
        index[places].clamp_min(0),
        p,
        terms,
        scale,
        softcap,
    )
    count, mass = p.new_tensor(float(len(places))), p.sum().clamp_min(torch.finfo(p.dtype).tiny)
    means = totals / torch.stack([count if term is _variation else mass for term in terms])
    if len(terms) == 1:
        return means[0]
    mix = torch.exp(-LK_DECAY * (1 - means[1].detach()))
    return mix * means[0] + (1 - mix) * means[1]
