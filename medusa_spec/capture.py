"""Catches the tensor that enters a module during one forward, for this context alone. Knows one module, no models."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn


class CutError(Exception):
    """Ends a forward once the tensor is known; caught by whoever asked for the cut."""


class Captured(list[torch.Tensor]):
    """The tensors caught, in order.

    Args:
        cut: Whether to end the forward at the first one.
    """

    def __init__(self, *, cut: bool) -> None:
        super().__init__()
        self.cut = cut


_wanted: ContextVar[Captured | None] = ContextVar("medusa_spec_capture", default=None)
"""Where *this* context's forward puts what enters the module; other threads' forwards see None."""


@contextmanager
def capturing(*, cut: bool = False) -> Iterator[Captured]:
    """Within it, inputs of modules with the hook `capture_input` are collected; with `cut` the first one raises."""
    captured = Captured(cut=cut)
    token = _wanted.set(captured)
    try:
        yield captured
    finally:
        _wanted.reset(token)


def capture_input(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    """A forward-pre-hook; does nothing in a context that does not ask."""
    captured = _wanted.get()
    if captured is not None:
        captured.append(args[0])
        if captured.cut:
            raise CutError
