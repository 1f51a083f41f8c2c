"""Sequential heads made fast for decoding, level by level. Same guesses as the modules; knows no trees."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from medusa_spec.heads.base import DraftHeads
from medusa_spec.heads.stacked import Linear, dense_linear


class LevelHeads(ABC):
    """A frozen copy of sequential heads that drafts a tree one level at a time.

    The state of a node is all that its children's guesses are made from: [M, F] for M nodes of one depth.

    Args:
        heads: Trained heads.
        dtype: Compute dtype, the target's.
        device: Where to compute.
        linear: Makes a linear from frozen weights [out, in] and biases; the caller may know a faster one than torch's.
    """

    def __init__(
        self,
        heads: DraftHeads,
        *,
        dtype: torch.dtype,
        device: torch.device,
        linear: Callable[[torch.Tensor, torch.Tensor | None], Linear] = dense_linear,
    ) -> None:
        assert heads.embedding is not None, "sequential families have one"
        self.config, self.dtype, self.device = heads.config, dtype, device
        self.projection = heads.projection.to(dtype, device)
        self.embedding = heads.embedding.to(dtype, device)
        self._linear = linear
        self._copies: dict[nn.Module, Any] = {}
        shared = linear(self.projection.weight, self.projection.bias) if heads.config.lm_head != "own" else None
        self._ends = [self._end(heads.head(k), shared) for k in range(heads.config.num_heads)]

    def frozen(self, module: Any) -> Linear:
        """A module of the heads as a function, an `nn.Linear` as a fast one; tied weights are held once."""
        if module not in self._copies:
            self._copies[module] = self._freeze(module)
        return self._copies[module]

    def _freeze(self, module: Any) -> Linear:
        if not isinstance(module, nn.Linear):
            return copy.deepcopy(module).requires_grad_(False).to(self.device, self.dtype)
        return self.dense(module.weight, module.bias)

    def dense(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Trained weights [out, in] and biases as a fast function of a copy of them."""
        copied = weight.detach().to(self.device, self.dtype, copy=True).contiguous()
        return self._linear(copied, None if bias is None else bias.detach().to(self.device, self.dtype, copy=True))

    def frozen_blocks(self, blocks: Any) -> Linear:
        """Residual blocks of a head, one after the other, as one function: [M, H] to [M, H]."""
        linears = [self.frozen(block.linear) for block in blocks]

        def run(z: torch.Tensor) -> torch.Tensor:
            for linear in linears:
                z = z + nn.functional.silu(linear(z))
            return z

        return run

    def _end(self, head: Any, shared: Linear | None) -> Linear:
        if shared is None:
            return self.frozen(head.lm_head)
        if not hasattr(head, "up"):
            return shared
        down, up = self.frozen(head.down), self.frozen(head.up)
        return lambda z: shared(z) + up(down(z))

    @abstractmethod
    def start(self, h: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        """States of M roots, of as many texts: from h [M, H] and their tokens, int64 [M], to [M, F]."""

    @abstractmethod
    def descend(self, depth: int, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """States of children at `depth`: from their parents' [M, F] and their tokens, int64 [M], to [M, F']."""

    @abstractmethod
    def features(self, depth: int, state: torch.Tensor) -> torch.Tensor:
        """What the LM head reads at nodes of `depth`: [M, F] to [M, H]."""

    def logits(self, depth: int, state: torch.Tensor) -> torch.Tensor:
        """Draft logits of the children of nodes of `depth` (the root's is 0): [M, F] to [M, draft vocabulary]."""
        return self.projection.finish(self._ends[depth](self.features(depth, state)))
