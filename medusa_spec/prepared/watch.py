"""Notices when modules are no longer what they were when a kernel was found to do their work. Knows no kernels."""

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks as _everywhere
from torch.nn.modules.module import _global_forward_pre_hooks as _everywhere_before
from transformers.utils import output_capturing

CAPTURING = "install_output_capuring_hook.<locals>.output_capturing_hook"
"""Qualified name of transformers' hooks; another one would be taken for somebody who listens."""

_trains = attrgetter("requires_grad")


class Watch:
    """Everything below a module as it was: parts, classes, numbers, places of weights, and nobody who listens.

    A kernel that does the work of many modules passes by hooks, adapters put in front of a layer, layers that were
    exchanged, cast or trained. What is written into a weight in place is not watched: kernels read it where it is.

    It is asked before every pass, of hundreds of modules: comparisons run over flat lists, without Python in between.

    Args:
        root: The module. Hooks of its own are left to whoever calls it.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        modules = list(root.modules())
        parts = modules[1:]
        self.states = [vars(module) for module in modules]
        self.listeners = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self.listeners += [_everywhere, _everywhere_before]
        self.modules = _Contents(module._modules for module in modules)
        self.kinds = [type(part) for part in self.modules.known]
        self.parameters = _Contents(module._parameters for module in modules)
        self.weights = [weight for weight in self.parameters.known if weight is not None]
        self.places = [weight.data_ptr() for weight in self.weights]
        self.numbers = [
            (state, name, value) for state in self.states for name, value in state.items() if isinstance(value, float)
        ]

    def holds(self) -> bool:
        """Whether all is as it was."""
        return (
            (not any(self.listeners) or all_dormant(self.listeners))
            and self.modules.same()
            and self.parameters.same()
            and list(map(type, self.modules.known)) == self.kinds
            and list(map(torch.Tensor.data_ptr, self.weights)) == self.places
            and not any(map(_trains, self.weights))
            and not any(state["training"] or "forward" in state for state in self.states[1:])
            and not self.root.training
            and all(state.get(name) == value for state, name, value in self.numbers)
        )


def all_dormant(listeners: Iterable[Any]) -> bool:
    """Whether all hooks are those that transformers leaves on layers, and nobody has this forward's states collected.

    They are put there once, by the first pass that is asked for hidden states or attentions, and stay.
    """
    hooks = [hook for hooks in listeners for hook in list(hooks.values())]
    return collecting() is False and all(getattr(hook, "__qualname__", None) == CAPTURING for hook in hooks)


def collecting() -> bool | None:
    """Whether this context's forward has its states collected by transformers; None if that cannot be told."""
    collector = getattr(output_capturing, "_active_collector", None)
    return None if collector is None else collector.get() is not None


class _Contents:
    """The values of many dicts, as they were."""

    def __init__(self, dicts: Iterable[dict[str, Any]]) -> None:
        self.dicts = list(dicts)
        self.sizes = list(map(len, self.dicts))
        self.known = [value for part in self.dicts for value in part.values()]

    def same(self) -> bool:
        """Whether they hold the very same objects."""
        if list(map(len, self.dicts)) != self.sizes:
            return False
        return all(map(is_, chain.from_iterable(map(dict.values, self.dicts)), self.known))
