"""How far an LM head's distributions moved, in pieces that fit the memory. Knows tensors, no model and no files."""

from typing import Any

import torch

from medusa_spec.finetune.losses import CHUNK_ELEMENTS
from medusa_spec.heads import Projection


class _LinearDivergence(torch.autograd.Function):
    """Sum of KL(softmax(finish(t W^T + b)) || softmax(finish(z W^T + b))), its gradient by z computed on the way."""

    @staticmethod
    def forward(
        ctx: Any, z: torch.Tensor, teacher: torch.Tensor, weight: torch.Tensor, projection: Projection
    ) -> torch.Tensor:
        grad_z = torch.empty_like(z)
        total = z.new_zeros((), dtype=weight.dtype)
        rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
        for start in range(0, len(z), rows):
            piece = slice(start, start + rows)
            log_p = projection(teacher[piece].to(weight.dtype)).log_softmax(1)
            logits = torch.nn.functional.linear(z[piece].to(weight.dtype), weight, projection.bias)
            finished = projection.finish(logits)
            log_q = finished.log_softmax(1)
            p = log_p.exp()
            total += (p * (log_p - log_q)).sum()
            grad = log_q.exp_().sub_(p)
            if projection.softcap is not None:
                grad *= 1 - (finished / projection.softcap).square()
            grad_z[piece] = (grad * projection.scale @ weight).to(z.dtype)
        ctx.save_for_backward(grad_z)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Any, ...]:
        (grad_z,) = ctx.saved_tensors
        return grad_z * upstream[0].to(grad_z.dtype), None, None, None


def linear_divergence(z: torch.Tensor, teacher: torch.Tensor, projection: Projection) -> torch.Tensor:
    """Mean over the positions of the KL divergence of an LM head's distributions from those it had.

    Args:
        z: What the LM head reads now [T, H].
        teacher: What it read before [T, H]; no gradient runs into it.
        projection: The LM head, frozen, in the dtype of the loss.

    Returns:
        A scalar; zero, with a zero gradient, if there is no position.
    """
    if len(z) == 0:
        return z.sum() * 0.0
    return _LinearDivergence.apply(z, teacher, projection.weight, projection) / len(z)
