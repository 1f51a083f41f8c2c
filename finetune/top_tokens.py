"""The likeliest tokens of an LM head at many positions, without ever holding all logits. Knows tensors, no files."""

import torch

from medusa_spec.finetune.losses import CHUNK_ELEMENTS
from medusa_spec.heads import Projection

VOCABULARY_SLICE = 4096
"""Rows of the LM head taken at a time: a slice is cast to float32, so that its logits need no float32 copy of all."""


@torch.no_grad()
def top_log_probs(h: torch.Tensor, projection: Projection, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest tokens at each position, and the logarithms of their true probabilities.

    They are probabilities over all V, the target's own scale and soft-cap in them: one minus their sum is the mass of
    the tokens that are left out.

    Args:
        h: [T, H], of any float dtype, on any device.
        projection: The target's LM head, all V rows; computed in float32 or finer.
        count: k, at most V.

    Returns:
        Ids int64 [T, k] by falling probability; log-probabilities [T, k], in float32 or finer, on h's device.
    """
    rows = max(1, CHUNK_ELEMENTS // min(VOCABULARY_SLICE, projection.weight.shape[0]))
    parts = [_chunk(part, projection, count) for part in h.split(rows)]
    return torch.cat([ids for ids, _ in parts]).to(h.device), torch.cat([logs for _, logs in parts]).to(h.device)


def _chunk(h: torch.Tensor, projection: Projection, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight, bias = projection.weight, projection.bias
    dtype = torch.promote_types(torch.promote_types(h.dtype, weight.dtype), torch.float32)
    h = h.to(weight.device, dtype)
    ids = torch.empty(len(h), 0, dtype=torch.int64, device=h.device)
    best, total = h.new_empty(len(h), 0), h.new_full((len(h),), -torch.inf)
    for start in range(0, weight.shape[0], VOCABULARY_SLICE):
        piece = slice(start, start + VOCABULARY_SLICE)
        part = None if bias is None else bias[piece].to(dtype)
        logits = projection.finish(torch.nn.functional.linear(h, weight[piece].to(dtype), part))
        total = torch.logaddexp(total, logits.logsumexp(1))
        found = logits.topk(min(count, logits.shape[1]))
        best, ids = torch.cat([best, found.values], 1), torch.cat([ids, found.indices + start], 1)
        kept = best.topk(min(count, best.shape[1]))
        best, ids = kept.values, ids.gather(1, kept.indices)
    return ids, best - total[:, None]
