"""Gives one module a faster forward in place, and takes it back. Knows no kinds of modules."""

from functools import cache
from typing import Any

import torch
from torch import nn

RECORD = "_medusa_spec_fast"
"""Attribute of a swapped module that holds what its fast forward needs."""

SCALES = (1.0, 1e4)
"""Sizes of states at which a module and its fast forward are compared: a clamp shows at large ones only."""


class Swapped(nn.Module):
    """Base of the fast forwards: mixed into a module's own class, so that it stays an instance of it.

    Copies and pickles are modules of the plain class: addresses and packed weights are of this one alone.
    """

    plain: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the plain class, without the record."""
        state = {key: value for key, value in self.__dict__.items() if key != RECORD}
        return self.plain.__new__, (self.plain,), state


def swap(module: nn.Module, fast: type[Swapped], record: Any) -> None:
    """Gives a module the forward of `fast`, which finds `record` under the attribute `RECORD`."""
    made: Any = module  # its class changes in place, which type checkers cannot follow
    mixed: Any = _mixed
    made.__dict__[RECORD] = record
    made.__class__ = mixed(fast, type(module))


def swap_back(module: nn.Module) -> None:
    """Gives a swapped module its own class back; others are left alone.

    So is one whose class somebody derived anew (a parametrized weight): its forward needs the record.
    """
    if isinstance(module, Swapped) and "plain" in vars(type(module)):
        made: Any = module
        made.__class__ = module.plain
        made.__dict__.pop(RECORD, None)


@cache
def _mixed(fast: type[Swapped], plain: type[nn.Module]) -> type[nn.Module]:
    """A class with the plain one's name: what asks for names (device maps, printing) finds what it found before."""
    return type(
        plain.__name__, (fast, plain), {"plain": plain, "__module__": plain.__module__, "__doc__": plain.__doc__}
    )


def swappable(module: nn.Module) -> bool:
    """Whether a module's forward is that of its class: hooks of offloading replace it on the instance."""
    return "forward" not in module.__dict__ and not isinstance(module, Swapped)


def sample(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Random numbers for comparing a module with its fast forward; the global random state is left alone."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32) * scale).to(dtype)


def within_rounding(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two results of one computation differ by no more than the last bit of some elements."""
    if got.shape != expected.shape or not bool(expected.isfinite().all()):
        return False
    unit = torch.finfo(expected.dtype).eps
    close = torch.isclose(got.double(), expected.double(), rtol=2 * unit, atol=2 * unit * float(expected.abs().mean()))
    return bool(close.all())
