"""The weight of a linear layer, or of what stands in its place. Knows no adapters, only what layers do."""

from typing import Any

import torch
from torch import nn


def weight_of(layer: Any) -> torch.Tensor:
    """W [out, in] of x -> W x + b, differentiably.

    An adapter around a linear layer shows the frozen weight inside it, and its own share would get no gradient. So
    whatever is no plain `nn.Linear` is asked what it makes of every unit vector.
    """
    if type(layer) is nn.Linear:
        return layer.weight
    unit = torch.eye(layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device)
    out = layer(unit) if layer.bias is None else layer(unit) - layer.bias
    return out.T
