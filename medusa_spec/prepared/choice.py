"""The most likely tokens of every row of logits. Knows no rules of acceptance, and no drafts."""

import torch

from medusa_spec.prepared.kernels import kernels, takes


def most_likely(logits: torch.Tensor) -> list[int]:
    """Arg-max of logits [N, V], the lowest id on equal ones, as plain decoding chooses: from float32.

    bfloat16 is slow to search on CPUs, and widening it first is a copy: a kernel does both where there is one.
    """
    found = kernels(logits.dtype) if logits.device.type == "cpu" else None
    if found is None or not takes(logits, logits.dtype) or not logits.is_contiguous():
        return logits.float().argmax(dim=-1).tolist()
    places = torch.empty(logits.shape[0], dtype=torch.int64, device="cpu")
    found.argmax(logits.data_ptr(), places.data_ptr(), *logits.shape, torch.get_num_threads())
    return places.tolist()


def likeliest(logits: torch.Tensor, count: int, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The best guesses of every row and their chances, softmax(logits / temperature), computed in float32.

    Args:
        logits: [M, V].
        count: How many; V if there are no more.
        temperature: Above 0.

    Returns:
        Int64 [M, count], the likeliest first (of equal ones in any order), and float32 [M, count], where logits are;
        nan where a logit is nan or infinite upwards.
    """
    count = min(count, logits.shape[1])
    found = kernels(logits.dtype) if logits.device.type == "cpu" else None
    if found is None or not takes(logits, logits.dtype) or not logits.is_contiguous():
        wide = logits.float() / temperature
        best = wide.topk(count, dim=-1)
        return best.indices, (best.values - wide.logsumexp(-1, keepdim=True)).exp()
    places = torch.empty(logits.shape[0], count, dtype=torch.int64, device="cpu")
    chances = torch.empty(logits.shape[0], count, dtype=torch.float32, device="cpu")
    found.likeliest(logits.data_ptr(), places.data_ptr(), chances.data_ptr(), *logits.shape, count, temperature)
    return places, chances
