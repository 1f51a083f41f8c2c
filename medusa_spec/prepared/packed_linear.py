"""A frozen linear layer for a few rows: packed weights and the kernel that reads them. Knows no modules, no models."""

from collections.abc import Callable, Sequence

import torch

from medusa_spec.prepared.kernels import ELEMENTS, block_width, kernels

Linear = Callable[[torch.Tensor], torch.Tensor]


def available(dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the kernel is there on this machine for weights of a dtype."""
    return kernels(dtype) is not None


def packed_size(outputs: int, inputs: int) -> int:
    """Elements that packed weights take: the last block of outputs is padded."""
    return -(-outputs // block_width()) * block_width() * inputs


def pack(weight: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """Weights [outputs, inputs] in the kernel's layout.

    Args:
        weight: bfloat16 or float32.
        into: Flat tensor of `packed_size` elements to write to; None makes one.

    Returns:
        [blocks, inputs, `block_width()`], where the outputs of a block stand in order for float32, and for bfloat16
        those of its two halves alternate (0, 16, 1, 17, … where the width is 32), the last block padded with zeros.
    """
    outputs, inputs = weight.shape
    width = block_width()
    blocks = -(-outputs // width)
    if into is None:
        into = torch.empty(blocks * width * inputs, dtype=weight.dtype, device="cpu")
    padded = weight.detach()
    if outputs < blocks * width:
        padded = weight.new_zeros(blocks * width, inputs)
        padded[:outputs] = weight.detach()
    packed = into.view(blocks, inputs, width)
    packed.view(_order(blocks, inputs, width, weight.dtype)).copy_(_blocked(padded, blocks, inputs))
    return packed


def unpack(packed: torch.Tensor, outputs: int) -> torch.Tensor:
    """The inverse of `pack`, bit for bit: [outputs, inputs]."""
    blocks, inputs, width = packed.shape
    dense = torch.empty(blocks * width, inputs, dtype=packed.dtype, device="cpu")
    _blocked(dense, blocks, inputs).copy_(packed.view(_order(blocks, inputs, width, packed.dtype)))
    return dense[:outputs].clone() if outputs < blocks * width else dense


def _order(blocks: int, inputs: int, width: int, dtype: torch.dtype) -> tuple[int, ...]:
    return (blocks, inputs, width // 2, 2) if dtype == torch.bfloat16 else (blocks, inputs, width, 1)


def _blocked(dense: torch.Tensor, blocks: int, inputs: int) -> torch.Tensor:
    """A view of dense weights whose last three axes are in the order of the packed ones."""
    if dense.dtype == torch.bfloat16:
        return dense.view(blocks, 2, -1, inputs).permute(0, 3, 2, 1)
    return dense.view(blocks, -1, inputs).permute(0, 2, 1).unsqueeze(-1)


class PackedLinear:
    """x W^T + b through the kernel, for bfloat16 or float32 on CPU.

    Products are accumulated in float32 and rounded once, as in torch's own linear, in another order of summation:
    results differ from it as those of two thread counts do. A row's result does not depend on the rows beside it.

    Args:
        weight: [outputs, inputs], bfloat16 or float32, on CPU.
        into: Where to keep the packed weights; see `pack`.
    """

    def __init__(self, weight: torch.Tensor, into: torch.Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self._bind(pack(weight, into))

    @classmethod
    def joined(cls, parts: Sequence["PackedLinear"], memory: torch.Tensor) -> "PackedLinear":
        """Several layers of one input as one, over the memory in which they lie packed one behind the other.

        All but the last must have a multiple of `block_width()` outputs.
        """
        made = cls.__new__(cls)
        made.outputs, made.inputs = sum(part.outputs for part in parts), parts[0].inputs
        made._bind(memory.view(-1, made.inputs, block_width()))
        return made

    def _bind(self, packed: torch.Tensor) -> None:
        found = kernels(packed.dtype)
        assert found is not None, "ask available() first"
        self.packed, self.dtype = packed, packed.dtype
        self._kernel, self._weight_at = found.linear, packed.data_ptr()
        self._widens = packed.dtype == torch.bfloat16

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., inputs] and a bias [outputs] to [..., outputs]."""
        if x.shape[-1] != self.inputs or x.dtype != self.dtype or x.device.type != "cpu":
            raise ValueError(
                f"x must be {ELEMENTS[self.dtype]} on the CPU with {self.inputs} features, got {x.dtype} on {x.device} "
                f"with {x.shape[-1]}"
            )
        x = x.contiguous()
        bias = None if bias is None else bias.detach().float().contiguous()
        rows = x.numel() // self.inputs
        # The kernel knows addresses alone: dtype and device must not be left to the user's defaults.
        y = torch.empty(*x.shape[:-1], self.outputs, dtype=self.dtype, device="cpu")
        scratch = torch.empty(rows * self.inputs, dtype=torch.float32, device="cpu") if self._widens else x
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
    if available(weight.dtype) and weight.device.type == "cpu":
        packed, wide = PackedLinear(weight), None if bias is None else bias.detach().float()
        return lambda x: packed(x, wide)
    return lambda x: torch.nn.functional.linear(x, weight, bias)
