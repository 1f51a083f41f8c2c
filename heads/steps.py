"""Autoregressive heads made fast for decoding, step by step. Same guesses as the modules; knows no trees."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from medusa_spec.heads.autoregressive import AutoregressiveHead, AutoregressiveHeads
from medusa_spec.heads.stacked import Linear, dense_linear
from medusa_spec.heads.view import View

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]

Step = Callable[[torch.Tensor, torch.Tensor, View], torch.Tensor | None]
"""From features and embeddings [M, H] of rows to their next features, or None if it does not serve this pass."""

MakeStep = Callable[[AutoregressiveHead], Step | None]
"""Makes a step from a frozen head, whose layers it may exchange for equal ones; None if it knows no faster one."""


class FastLinear(nn.Module):
    """A frozen linear layer as a function of the caller's choice."""

    def __init__(self, layer: nn.Linear, make: MakeLinear) -> None:
        super().__init__()
        self.run = make(layer.weight.detach().contiguous(), None if layer.bias is None else layer.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        return self.run(x)


class DraftSteps:
    """A frozen copy of autoregressive heads that runs one step at a time.

    Args:
        heads: Trained heads.
        dtype: Compute dtype, the target's.
        device: Where to compute.
        linear: Makes a linear from frozen weights [out, in] and biases; the caller may know a faster one than torch's.
        step: Makes a whole step from a frozen head.
    """

    def __init__(
        self,
        heads: AutoregressiveHeads,
        *,
        dtype: torch.dtype,
        device: torch.device,
        linear: MakeLinear = dense_linear,
        step: MakeStep = lambda head: None,
    ) -> None:
        assert heads.embedding is not None, "sequential families have one"
        self.config, self.dtype, self.device, self.taps = heads.config, dtype, device, heads.taps
        self.num_sets = heads.num_sets
        self.projection = heads.projection.to(dtype, device)
        self.embedding = heads.embedding.to(dtype, device)
        copied: Any = copy.deepcopy(heads.heads).requires_grad_(False).eval().to(device, dtype)
        self._fast = [step(head) for head in copied]
        for head in copied:
            _exchange(head, linear)
        self._heads = list(copied)
        self._shared = None
        if heads.config.lm_head != "own":
            self._shared = linear(self.projection.weight, self.projection.bias)

    def begin(self, h: torch.Tensor, layers: torch.Tensor | None) -> torch.Tensor:
        """Features of tokens that the target has read: h [T, H] and tapped layers [T, L, H] to [T, H]."""
        return self._heads[0].begin(h, layers)

    def step(self, k: int, feature: torch.Tensor, tokens: torch.Tensor, view: View) -> torch.Tensor:
        """The next features: from those of M rows, [M, H], and the tokens after them, int64 [M], to [M, H]."""
        number, vector = k % self.num_sets, self.embedding(tokens)
        fast = self._fast[number]
        found = None if fast is None else fast(feature, vector, view)
        return self._heads[number].step(feature[None], vector[None], view)[0] if found is None else found

    def logits(self, k: int, feature: torch.Tensor) -> torch.Tensor:
        """Draft logits of what follows rows of step k: [M, H] to [M, draft vocabulary]."""
        head = self._heads[k % self.num_sets]
        z = head.features(feature)
        if self._shared is None:
            return self.projection.finish(head.lm_head(z))
        raw = self._shared(z)
        return self.projection.finish(raw + head.up(head.down(z)) if hasattr(head, "up") else raw)


def _exchange(module: nn.Module, linear: MakeLinear) -> None:
    """Puts fast functions in the place of all linear layers below a module."""
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, FastLinear(child, linear))
        else:
            _exchange(child, linear)
