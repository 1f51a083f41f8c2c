"""Notices when modules are no longer what they were when a kernel was found to do their work. Knows no kernels."""

from typing import Any

from torch import nn
from torch.nn.modules.module import _global_forward_hooks as _everywhere
from torch.nn.modules.module import _global_forward_pre_hooks as _everywhere_before


class Watch:
    """Everything below a module as it was: parts, classes, numbers, places of weights, and nobody who listens.

    A kernel that does the work of many modules passes by hooks, adapters put in front of a layer, layers that were
    exchanged, cast or trained. What is written into a weight in place is not watched: kernels read it where it is.

    Args:
        root: The module. Hooks of its own are left to whoever calls it.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.parents: list[tuple[dict[str, Any], int]] = []
        self.parts: list[tuple[dict[str, Any], str, nn.Module, type[nn.Module]]] = []
        self.weights: list[tuple[dict[str, Any], str, Any, int]] = []
        self.numbers: list[tuple[dict[str, Any], str, float]] = []
        for parent in root.modules():
            self.parents.append((parent._modules, len(parent._modules)))
            self.parts += [(parent._modules, name, part, type(part)) for name, part in parent.named_children()]
            own = vars(parent)
            self.numbers += [(own, name, value) for name, value in own.items() if isinstance(value, float)]
            for name, weight in parent._parameters.items():
                self.weights.append((parent._parameters, name, weight, 0 if weight is None else weight.data_ptr()))

    def holds(self) -> bool:
        """Whether all is as it was."""
        if _everywhere or _everywhere_before or self.root.training:
            return False
        for parts, count in self.parents:
            if len(parts) != count:
                return False
        for parts, name, part, kind in self.parts:
            if parts.get(name) is not part or part.__class__ is not kind or "forward" in part.__dict__:
                return False
            if part._forward_hooks or part._forward_pre_hooks or part.training:
                return False
        for own, name, value in self.numbers:
            if own.get(name) != value:
                return False
        for weights, name, weight, place in self.weights:
            if weights.get(name) is not weight:
                return False
            if weight is not None and (weight.data_ptr() != place or weight.requires_grad):
                return False
        return True
