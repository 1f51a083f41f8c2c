"""What stands between a decoder's last layer and its LM head, found by what it computes. Knows no names of modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from medusa_spec.backbone import Backbone
from medusa_spec.errors import UnsupportedError
from medusa_spec.taps import find_layers


class LastNorm:
    """Turns what leaves the last layer into h, as the model itself does.

    ```
    … ──► layer n - 1 ──► (here) ──► norm ──► h ──► LM head
    ```

    Args:
        backbone: The target.

    Raises:
        UnsupportedError: If it is not one module of the decoder, and h is not what leaves the last layer either.
    """

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        self.decoder = backbone.model.get_decoder()
        self.layers = find_layers(self.decoder, getattr(backbone.config, "num_hidden_layers", None))
        ids = torch.arange(1, 9, device=backbone.device).remainder(backbone.ids_below).unsqueeze(0)
        with _watching(
            [module for _, module in self.decoder.named_modules() if module not in set(self.layers)]
        ) as seen:
            last, h = self._run(ids)
        found = [module for module, given, came in seen if _same(given, last) and _same(came, h)]
        if not found and not _same(last, h):
            raise UnsupportedError(
                f"{type(self.decoder).__name__} does not turn what leaves its last layer into h by one module, so "
                "states of another engine, which come from before it, cannot be used; leave states_dump out"
            )
        self.module: nn.Module | None = found[0] if found else None

    @torch.no_grad()
    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """H of states [..., H] that left the last layer, on the device and in the dtype of the model's own h."""
        hidden = hidden.to(self.backbone.device, self.backbone.dtype)
        if self.module is None:
            return hidden
        weights = next(self.module.parameters(), None)
        return self.module(hidden if weights is None else hidden.to(weights.device))

    @torch.no_grad()
    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """All states of a text of ids [T]: [T, n + 2, H], what enters each of n layers, what leaves the last, and h."""
        caught: list[torch.Tensor] = []
        handle = self.layers[-1].register_forward_hook(lambda module, given, came: caught.append(_tensor(came)))
        try:
            states = self.backbone.states(ids[None].to(self.backbone.device), taps=tuple(range(len(self.layers))))
        finally:
            handle.remove()
        assert states.layers is not None
        rest = torch.stack([caught[-1].reshape(states.h.shape).to(states.h.device), states.h], 2)
        return torch.cat([states.layers, rest], 2)[0]

    def _run(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What leaves the last layer, and h."""
        states = self.states(ids[0])
        return states[:, -2], states[:, -1]


@contextmanager
def _watching(modules: list[nn.Module]) -> Iterator[list[tuple[nn.Module, Any, Any]]]:
    """Within it, what these modules are given and give is noted."""
    seen: list[tuple[nn.Module, Any, Any]] = []
    handles = [
        module.register_forward_hook(
            lambda module, given, came: seen.append((module, given[0] if given else None, came))
        )
        for module in modules
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _same(one: Any, other: torch.Tensor) -> bool:
    one = _tensor(one)
    if not isinstance(one, torch.Tensor) or one.numel() != other.numel() or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(other.shape).to(other.device), other)


def _tensor(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and value else value
