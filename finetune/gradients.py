"""How large each head's gradient is. Knows names of parameters, no trainer."""

import re
from typing import Any

import torch
from torch import nn

HEAD = re.compile(r"(?:^|\.)heads\.(\d+)\.")
"""In the name of a parameter: whose it is."""


def set_of(name: str) -> int:
    """The set of weights that a parameter belongs to, by its name; what all heads have in common is in set 0."""
    found = HEAD.search(name)
    return int(found.group(1)) if found else 0


def gradient_norms(model: nn.Module) -> dict[int, float]:
    """The norm of each set of weights' gradient, sharded gradients put together; 0 where there is none.

    Args:
        model: `TrainedHeads`; heads that are tied are one set.
    """
    squares: dict[int, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found = squares.setdefault(set_of(name), [])
            if parameter.grad is not None:
                found.append(_whole(torch.linalg.vector_norm(parameter.grad)))
    return {
        number: float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
        for number, norms in sorted(squares.items())
    }


def _whole(norm: Any) -> torch.Tensor:
    """A norm over all shards: those of FSDP are tensors of their own kind."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
