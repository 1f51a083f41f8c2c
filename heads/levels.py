"""Sequential heads made fast for decoding, level by level. Same guesses as the modules; knows no trees."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

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
        shared = linear(self.projection.weight, self.projection.bias) if heads.config.lm_head != "own" else None
        self._ends = [self._end(head, shared) for head in heads.heads]

    def frozen(self, module: Any) -> Linear:
        """An `nn.Linear` of the heads as a fast function."""
        return self.dense(module.weight, module.bias)

    def dense(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Weights [out, in] and biases, trained ones, as a fast function."""
        bias = None if bias is None else bias.detach().to(self.device, self.dtype)
        return self._linear(weight.detach().to(self.device, self.dtype).contiguous(), bias)

    def _end(self, head: Any, shared: Linear | None) -> Linear:
        if shared is None:
            return self.frozen(head.lm_head)
        if not hasattr(head, "up"):
            return shared
        down, up = self.frozen(head.down), self.frozen(head.up)
        return lambda z: shared(z) + up(down(z))

    @abstractmethod
    def start(self, h: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        """State of the root: from h [H] and its token, int64 [1], to [1, F]."""

    @abstractmethod
    def descend(self, depth: int, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """States of children at `depth`: from their parents' [M, F] and their tokens, int64 [M], to [M, F']."""

    @abstractmethod
    def features(self, depth: int, state: torch.Tensor) -> torch.Tensor:
        """What the LM head reads at nodes of `depth`: [M, F] to [M, H]."""

    def logits(self, depth: int, state: torch.Tensor) -> torch.Tensor:
        """Draft logits of the children of nodes of `depth` (the root's is 0): [M, F] to [M, draft vocabulary]."""
        return self.projection.finish(self._ends[depth](self.features(depth, state)))


class HydraLevels(LevelHeads):
    """Hydra heads: a node's state is h and the embeddings of the tokens on its path, [M, (depth + 2) * H]."""

    def __init__(self, heads: DraftHeads, **kwargs: Any) -> None:
        super().__init__(heads, **kwargs)
        modules: list[Any] = list(heads.heads)
        self._first = [self._first_of(head) for head in modules]
        self._blocks = [[self.frozen(block.linear) for block in head.blocks] for head in modules]

    def _first_of(self, head: Any) -> Linear:
        """W x + b, [M, H]; with a linear residual R x before it, [M, 2 * H], in one product."""
        if self.config.residual == "identity":
            return self.frozen(head.first)
        parts = (head.residual, head.first)
        weight, bias = torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
        return self.dense(weight, bias)

    def start(self, h: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        """h and the root's embedding, [1, 2 * H]."""
        return torch.cat([h.unsqueeze(0), self.embedding(root)], dim=1)

    def descend(self, depth: int, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The parents' states and the tokens' embeddings, [M, (depth + 2) * H]."""
        return torch.cat([state, self.embedding(tokens)], dim=1)

    def features(self, depth: int, state: torch.Tensor) -> torch.Tensor:
        """The blocks of head `depth`."""
        hidden, first = self.config.hidden_size, self._first[depth](state)
        kept = (state if self.config.residual == "identity" else first)[:, :hidden]
        z = kept + torch.nn.functional.silu(first[:, -hidden:])
        for block in self._blocks[depth]:
            z = z + torch.nn.functional.silu(block(z))
        return z


LEVELS: dict[str, type[LevelHeads]] = {"hydra": HydraLevels}
"""`HeadsConfig.kind` of the sequential families to their decoding form."""
