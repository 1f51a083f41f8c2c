"""A moving average of weights while they are trained. Knows parameters and a file, no training loop."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from medusa_spec.errors import CheckpointError
from medusa_spec.files import write_tensors

FILE_NAME = "average.safetensors"
"""In a training checkpoint."""


class WeightAverage:
    """Exponential moving average of the trained parameters of a module, in their own dtype.

    Args:
        module: Its parameters that want a gradient are averaged; the average begins as they are now.
        decay: Weight of what was before. Early steps count more, `(1 + step) / (10 + step)` at most: a short training
            would otherwise end near where it began.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._average = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the weights after a step, counted from 1."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, parameter in self._parameters.items():
            self._average[name].lerp_(parameter, 1 - decay)

    @torch.no_grad()
    def apply(self) -> None:
        """Makes the average the weights."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self._average[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The average is the weights for as long as this lasts."""
        weights = {name: p.detach().clone() for name, p in self._parameters.items()}
        self.apply()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(weights[name])

    def save(self, folder: Path) -> None:
        """Writes it beside the weights of a checkpoint."""
        write_tensors(folder / FILE_NAME, {name: t.cpu().contiguous() for name, t in self._average.items()})

    def load(self, folder: Path) -> None:
        """Goes on with the average of a checkpoint.

        Raises:
            CheckpointError: If there is none, or one of other parameters.
        """
        path = folder / FILE_NAME
        try:
            found = load_file(path)
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read ({error}); remove that checkpoint") from error
        if {name: t.shape for name, t in found.items()} != {name: t.shape for name, t in self._average.items()}:
            raise CheckpointError(f"{path} must average the parameters that are trained; remove that checkpoint")
        for name, tensor in self._average.items():
            tensor.copy_(found[name])
