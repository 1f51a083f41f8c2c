"""The most likely token of every row of logits. Knows no rules of acceptance."""

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
