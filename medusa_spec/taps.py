"""Catches the hidden states that enter layers of a decoder, for this context alone. Knows modules, no models."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from medusa_spec.errors import ConfigError, UnsupportedError


class Tapped:
    """What enters some of a decoder's layers in one forward.

    ```
    taps (0, 2)      embeddings ─┬─► layer 0 ──► layer 1 ─┬─► layer 2 ──► norm ──► h
                                 └ tap 0                  └ tap 2
    ```

    Args:
        layers: All layers of the decoder, in the order in which they run.
        taps: Numbers of the layers asked for, rising.

    Raises:
        ConfigError: If there is no such layer, or the numbers do not rise.
        UnsupportedError: If a layer runs in several places.
    """

    def __init__(self, layers: nn.ModuleList, taps: tuple[int, ...]) -> None:
        last = len(layers) - 1
        if any(tap not in range(last + 1) for tap in taps):
            raise ConfigError(
                f"taps must be numbers of decoder layers, 0 to {last}, got {taps}; h is what leaves the last one"
            )
        if any(tap >= behind for tap, behind in zip(taps, taps[1:], strict=False)):
            raise ConfigError(f"taps must rise and name each layer once, got {taps}; give {tuple(sorted(set(taps)))}")
        if len(set(layers)) < len(layers):
            raise UnsupportedError(
                f"{type(layers[0]).__name__} stands in several places of the decoder, so a tap cannot tell them apart; "
                "use heads that read h alone"
            )
        self.layers, self.taps = layers, taps
        self._numbers = {layers[tap]: tap for tap in taps}
        self._states: dict[int, Any] = {}

    def put(self, tap: int, hidden: Any) -> None:
        """Takes the hidden state [B, T, H] that enters layer `tap`."""
        self._states[tap] = hidden

    def put_of(self, layer: nn.Module, hidden: Any) -> None:
        """As `put`, by the layer itself; one that is not asked for is passed over."""
        if layer in self._numbers:  # another thread's hooks may stand on other layers
            self.put(self._numbers[layer], hidden)

    def stacked(self, like: torch.Tensor, *, last_only: bool = False) -> torch.Tensor:
        """All of them [B, T, L, H] on the device of `like`, or those of the last position [B, 1, L, H].

        Raises:
            UnsupportedError: If a layer was not called, or with something that is not [B, T, H].
        """
        states = [self._states.get(tap) for tap in self.taps]
        found = [state for state in states if isinstance(state, torch.Tensor) and state.dim() == 3]
        if len(found) < len(states):
            missing = [tap for tap, state in zip(self.taps, states, strict=True) if not any(state is s for s in found)]
            raise UnsupportedError(
                f"expected each {type(self.layers[0]).__name__} to be called with hidden states [B, T, H], which is "
                f"not so at taps {missing}; use heads that read h alone"
            )
        return torch.stack(
            [state[:, -1:].to(like.device) if last_only else state.to(like.device) for state in found], 2
        )


_wanted: ContextVar[Tapped | None] = ContextVar("medusa_spec_taps", default=None)
"""Where *this* context's forward puts what enters layers; other threads' forwards see None."""


@contextmanager
def tapping(tapped: Tapped | None) -> Iterator[None]:
    """Within it, whoever runs layers puts what enters them into `tapped`: `listening`, or a decoder in one call."""
    token = _wanted.set(tapped)
    try:
        yield
    finally:
        _wanted.reset(token)


def taps_of(layers: nn.Module) -> Tapped | None:
    """What this context asks of these very layers; None if nothing."""
    tapped = _wanted.get()
    return tapped if tapped is not None and tapped.layers is layers else None


@contextmanager
def listening() -> Iterator[None]:
    """Within it, hooks stand on the layers that this context asks for.

    They are gone afterwards: where a hook stands, layers are not run in one call (see `prepared/watch.py`). Another
    thread's forward passes by them and finds its own context.
    """
    tapped = _wanted.get()
    layers = [] if tapped is None else [tapped.layers[tap] for tap in tapped.taps]
    handles = []
    try:
        for layer in layers:
            handles.append(layer.register_forward_pre_hook(_put_input, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _put_input(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward-pre-hook; does nothing in a context that does not ask."""
    tapped = _wanted.get()
    if tapped is not None:
        tapped.put_of(layer, args[0] if args else kwargs.get("hidden_states"))


def find_layers(decoder: nn.Module, count: int | None) -> nn.ModuleList:
    """The layers of a decoder: the one list of `count` modules that lies nearest to its root.

    Lists further down (the experts of a layer) may be of the same length by chance.

    Raises:
        UnsupportedError: If there is none, or several lie equally near.
    """
    level = [decoder]
    while level:
        found = [module for module in level if isinstance(module, nn.ModuleList) and len(module) == count]
        if len(found) == 1:
            return found[0]
        if found:
            break
        level = [child for module in level for child in module.children()]
    raise UnsupportedError(
        f"taps need the decoder layers of {type(decoder).__name__}: looked for one nn.ModuleList of num_hidden_layers "
        f"= {count} modules and found {len(found) if level else 'none'}; use heads that read h alone"
    )
