"""A frozen linear layer for a few rows of bfloat16: packed weights and the kernel that reads them. Knows no models."""

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch

from medusa_spec.native.build import library

OUTPUTS = 32
"""Outputs per block of the packed layout; see native/bf16_gemm.c, which draws it."""

Linear = Callable[[torch.Tensor], torch.Tensor]


@lru_cache(maxsize=1)
def _kernel() -> Callable[..., None] | None:
    handle = library().handle
    if handle is None:
        return None
    kernel = handle.bf16_linear
    kernel.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_long] * 3 + [ctypes.c_int]
    kernel.restype = None
    return kernel


def available() -> bool:
    """Whether the kernel is there on this machine."""
    return _kernel() is not None


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Weights [outputs, inputs] in the kernel's layout [blocks, inputs, 16, 2], the last block padded with zeros."""
    outputs, inputs = weight.shape
    blocks = -(-outputs // OUTPUTS)
    padded = weight.new_zeros(blocks * OUTPUTS, inputs)
    padded[:outputs] = weight.detach()
    return padded.view(blocks, 2, OUTPUTS // 2, inputs).permute(0, 3, 2, 1).contiguous()


def unpack(packed: torch.Tensor, outputs: int) -> torch.Tensor:
    """The inverse of `pack`, bit for bit: [outputs, inputs]."""
    blocks, inputs = packed.shape[:2]
    return packed.permute(0, 3, 2, 1).reshape(blocks * OUTPUTS, inputs)[:outputs].contiguous()


class PackedLinear:
    """x W^T + b through the kernel, for bfloat16 on CPU.

    Products are accumulated in float32 and rounded once, as in torch's own bfloat16 linear, in another order of
    summation: results differ from it as those of two thread counts do.

    Args:
        weight: [outputs, inputs], bfloat16, on CPU.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        kernel = _kernel()
        assert kernel is not None, "ask available() first"
        self._kernel = kernel
        self.outputs, self.inputs = weight.shape
        self.packed = pack(weight)
        self._weight_at = self.packed.data_ptr()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., inputs] and a bias [outputs] to [..., outputs], bfloat16."""
        if x.shape[-1] != self.inputs or x.dtype != torch.bfloat16 or x.device.type != "cpu":
            raise ValueError(
                f"x must be bfloat16 on the CPU with {self.inputs} features, got {x.dtype} on {x.device} with "
                f"{x.shape[-1]}"
            )
        x = x.contiguous()
        bias = None if bias is None else bias.detach().float().contiguous()
        rows = x.numel() // self.inputs
        # The kernel knows addresses alone: dtype and device must not be left to the user's defaults.
        y = torch.empty(*x.shape[:-1], self.outputs, dtype=torch.bfloat16, device="cpu")
        scratch = torch.empty(rows * self.inputs, dtype=torch.float32, device="cpu")
        self._kernel(
            x.data_ptr(),
            self._weight_at,
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            scratch.data_ptr(),
            rows,
            self.inputs,
            self.outputs,
            torch.get_num_threads(),
        )
        return y


def fast_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The fastest linear with these frozen weights here: packed where the kernel serves, else torch's."""
    if available() and weight.dtype == torch.bfloat16 and weight.device.type == "cpu":
        packed = PackedLinear(weight)
        return lambda x: packed(x, bias)
    return lambda x: torch.nn.functional.linear(x, weight, bias)
