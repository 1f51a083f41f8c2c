"""Catches what enters or leaves a module during one forward, for this context alone. Knows one module, no models."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

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


_outputs: ContextVar[list[torch.Tensor] | None] = ContextVar("medusa_spec_capture_output", default=None)
"""As `_wanted`, for what leaves a module."""


@contextmanager
def capturing_output(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Within it, what leaves the module, or the first part of it, is collected; its hook is gone afterwards."""
    captured: list[torch.Tensor] = []
    token = _outputs.set(captured)
    handle = module.register_forward_hook(_capture_output)
    try:
        yield captured
    finally:
        handle.remove()
        _outputs.reset(token)


def _capture_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """A forward hook; does nothing in a context that does not ask."""
    captured = _outputs.get()
    if captured is not None:
        captured.append(output if isinstance(output, torch.Tensor) else output[0])
