"""Root-mean-square norms in one kernel, wherever a module turns out to compute one. Knows no models."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from medusa_spec.prepared.kernels import NORM_STYLES, Function, kernels, readable, takes
from medusa_spec.prepared.swap import RECORD, Swapped, sample, swap, swappable, within_rounding

EPSILONS = ("variance_epsilon", "eps")
"""What modules call what is added to the mean square."""


@dataclass(frozen=True, kw_only=True)
class NormRecord:
    """What the kernel needs.

    Attributes:
        kernel: The norm kernel.
        dtype: Of inputs and weight.
        epsilon: Added to the mean square.
        attribute: The module's name for that.
        style: Index into `NORM_STYLES`: where it rounds, and whether weights are kept as their distance from one.
    """

    kernel: Function
    dtype: torch.dtype
    epsilon: float
    attribute: str
    style: int


class FastNorm(Swapped):
    """Mixed into a module that is a root-mean-square norm with one weight."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[..., width] to the same shape."""
        record: NormRecord = self.__dict__[RECORD]
        x = args[0] if len(args) == 1 and not kwargs else None
        if x is None or not takes(x, record.dtype) or not still_fits(self, record, x.shape[-1]):
            return super().forward(*args, **kwargs)
        x, width = x.contiguous(), x.shape[-1]
        weight: Any = self._parameters["weight"]
        y = torch.empty_like(x)
        record.kernel(
            x.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            x.numel() // width,
            width,
            record.epsilon,
            record.style,
            torch.get_num_threads(),
        )
        return y


def still_fits(module: nn.Module, record: NormRecord, width: int) -> bool:
    """Whether the norm, as it is now, has a weight that the kernel may read, and the epsilon that it had."""
    weight = module._parameters.get("weight")
    if weight is None or weight.numel() != width or not _fits(weight, record.dtype):
        return False
    return module.__dict__.get(record.attribute) == record.epsilon


def _fits(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    return readable(weight, dtype) and weight.is_contiguous()


def norm_record(module: nn.Module) -> NormRecord | None:
    """What a module computes, if it is a root-mean-square norm that a kernel knows; found by comparing results."""
    weight = module._parameters.get("weight")
    attribute = next((name for name in EPSILONS if name in module.__dict__), "")
    epsilon = module.__dict__.get(attribute)
    if weight is None or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    if len(module._parameters) != 1 or module._buffers or module._modules:
        return None
    found = kernels(weight.dtype)
    if found is None or not _fits(weight, weight.dtype):
        return None
    width, best = len(weight), None
    xs = [sample(5, width, dtype=weight.dtype, seed=seed, scale=scale) for seed, scale in enumerate((1e-3, 1.0, 30.0))]
    for style in range(len(NORM_STYLES)):
        record = NormRecord(kernel=found.norm, dtype=weight.dtype, epsilon=epsilon, attribute=attribute, style=style)
        equal = _agreement(module, record, xs)
        if equal is not None and (best is None or equal > best[0]):
            best = (equal, record)
    return None if best is None else best[1]


def _agreement(module: nn.Module, record: NormRecord, xs: list[torch.Tensor]) -> float | None:
    """Share of equal elements, or None if any is further off than rounding explains."""
    equal = 0.0
    for x in xs:
        y, expected = torch.empty_like(x), module(x)
        arguments = (x.shape[0], x.shape[1], record.epsilon, record.style, 1)
        weight: Any = module.weight
        record.kernel(x.data_ptr(), weight.data_ptr(), y.data_ptr(), *arguments)
        if expected.dtype != y.dtype or not within_rounding(y, expected):
            return None
        equal += float((y == expected).float().mean())
    return equal


@torch.inference_mode()
def fasten_norm(module: nn.Module) -> bool:
    """Gives a frozen module the kernel's forward if it is a root-mean-square norm; says whether it was."""
    if not swappable(module) or any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
        return False
    record = norm_record(module)
    if record is not None:
        swap(module, FastNorm, record)
    return record is not None
