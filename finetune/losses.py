"""Cross-entropy of draft logits in pieces that fit the memory. Knows tensors, no model and no files."""

from typing import Any

import torch

CHUNK_ELEMENTS = 8 << 20
"""Logits alive at a time: 32 MB in float32."""


def finished_logits(
    z: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits [T, V] of features [T, H] after the target's own post-processing, see `Projection`; and the soft-cap's
    slope at each, None without one."""
    logits = torch.nn.functional.linear(z, weight, bias)
    if scale != 1.0:
        logits *= scale
    if softcap is None:
        return logits, None
    logits = torch.tanh(logits / softcap)
    slope = 1 - logits * logits
    return logits.mul_(softcap), slope


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropies of softmax(finish(z W^T + b)), its gradients computed on the way.

    Logits of all positions at once would take gigabytes over a large vocabulary; here a chunk's are made, turned into
    their gradient in place, multiplied back, and dropped.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        index: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        needs_weight = ctx.needs_input_grad[1]
        grad_z = torch.empty_like(z)
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if bias is not None else None
        total = z.new_zeros(())
        rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
        for start in range(0, len(z), rows):
            part, truth = z[start : start + rows], index[start : start + rows, None]
            logits, slope = finished_logits(part, weight, bias, scale, softcap)
            lse = logits.logsumexp(dim=1, keepdim=True)
            total += (lse - logits.gather(1, truth)).sum()
            grad = logits.sub_(lse).exp_()
            grad.scatter_add_(1, truth, grad.new_full(truth.shape, -1.0))
            if slope is not None:
                grad *= slope
            if scale != 1.0:
                grad *= scale
            grad_z[start : start + rows] = grad @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, part)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        ctx.save_for_backward(grad_z, grad_weight, grad_bias)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Any, ...]:
        grads = (None if grad is None else grad * upstream[0] for grad in ctx.saved_tensors)
        return (*grads, None, None, None)


def linear_cross_entropy(
    z: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    index: torch.Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """Mean over the positions of the cross-entropy of an LM head, without ever holding all logits.

    Args:
        z: Features [T, H], float32 or float64.
        weight: LM head [V or draft vocabulary, H].
        bias: Its biases, or None.
        index: Int64 [T], row of the true token in `weight`; negative where the position does not count.
        scale: See `Projection`.
        softcap: See `Projection`.

    Returns:
        A scalar; zero, with a zero gradient, if no position counts.
    """
    places = (index >= 0).nonzero().flatten()
    if len(places) == 0:
        return z.sum() * 0.0
    kept = z if len(places) == len(z) else z[places]
    total = _LinearCrossEntropy.apply(kept, weight, bias, index[places], scale, softcap)
    return total / len(places)


def depth_weights(num_heads: int, decay: float) -> torch.Tensor:
    """Float32 [K]: weight of each head's loss, `decay ** k`: what a deep head guesses only counts if all before it
    were right."""
    return decay ** torch.arange(num_heads, dtype=torch.float32)
