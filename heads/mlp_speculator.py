"""MLP speculators: a small recurrent network over h and the drafted tokens. Knows tensors, not where they come from."""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from medusa_spec.heads.base import DraftHeads
from medusa_spec.heads.block import ResidualBlock
from medusa_spec.heads.config import HeadsConfig
from medusa_spec.heads.head import Head
from medusa_spec.heads.levels import LevelHeads
from medusa_spec.heads.norm import ScaleShiftNorm, unit_scale
from medusa_spec.heads.options import StateOptions
from medusa_spec.heads.projection import Projection
from medusa_spec.heads.stacked import Linear


@dataclass(frozen=True, kw_only=True)
class SpeculatorOptions(StateOptions):
    """What MLP speculators can be told.

    Attributes:
        scale_input: h is brought to a mean square of one half first, whatever the target's scale.
        own_embedding: A trained table [V, inner size] in place of a trained linear over the target's embeddings.
        direct: `own` LM heads read the state itself, whatever its width, as published; otherwise H entries.
    """

    scale_input: bool = True
    own_embedding: bool = False
    direct: bool = False


class SpeculatorHead(Head):
    """Head k: the state from the one before and the token t + 1 + k, to a state of `inner_size` I.

    ```
    s' = GELU(norm(P s + a T(token)))      a² = (1 - w²) (I / 2) / w², w = 2 ** (-1 / 2K)
    z = O s'                               further blocks as Medusa's
    ```

    The norm is of root mean squares, with a trained factor and shift. a keeps h at half of the state's square at the
    last head where all parts start as they do here: P, T of entries that leave a mean square of 1 and of 1 / I. T is a
    linear over the target's embeddings, each brought to a mean square of one, or a table. O starts at zero: a fresh
    head gives all tokens the same logit, but for the LM head's bias. Published speculators have no O; here it is left
    out where the LM head is the head's `own` and I = H, or reads the state `direct`ly: a frozen one is made for
    features of another kind.

    Args:
        config: Sizes and the kind of LM head.
        projection: The target's LM head.
        options: I, and what is tied.
        k: Place of the head, from 0; a tied one is all of them.
    """

    def __init__(self, config: HeadsConfig, projection: Projection, options: SpeculatorOptions, k: int) -> None:
        hidden, inner = config.hidden_size, options.inner_size or config.hidden_size
        if options.direct and config.lm_head != "own":
            raise ValueError(f"direct must be False unless lm_head is 'own', got lm_head={config.lm_head!r}")
        super().__init__(config, projection, width=inner if options.direct else None)
        if k == 0:
            self.first = _linear(hidden, inner, std=inner**-0.5)
        if k > 0 or (options.tied and config.num_heads > 1):
            self.later = _linear(inner, inner, std=inner**-0.5)
        if options.own_embedding:
            self.token: nn.Module = nn.Embedding(config.vocab_size, inner)
            nn.init.normal_(self.token.weight, std=inner**-0.5)
        else:
            self.token = _linear(hidden, inner, std=(inner * hidden) ** -0.5)
        self.norm = ScaleShiftNorm(inner)
        bare = options.direct or (config.lm_head == "own" and inner == hidden)
        if not bare:
            self.out = _linear(inner, hidden, std=0.0)
        width = inner if bare else hidden
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(config.num_layers - 1))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """State [..., I] to what the LM head reads, [..., H], or [..., I] where it is `direct`."""
        z = self.out(x) if hasattr(self, "out") else x
        for block in self.blocks:
            z = block(z)
        return z


def _linear(inputs: int, outputs: int, *, std: float) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(linear.weight, std=std)
    return linear


class SpeculatorHeads(DraftHeads):
    """K heads that hand a state on.

    Source: Wertheimer et al. 2024, "Accelerating Production LLMs with Combined Token/Embedding Speculators".
    """

    Options = SpeculatorOptions
    sequential = True

    def make_head(self, k: int) -> SpeculatorHead:
        """The first reads h, the others a state."""
        return SpeculatorHead(self.config, self.projection, self.options, k)

    def features(self, h: torch.Tensor, tokens: torch.Tensor | None = None) -> list[torch.Tensor]:
        """K features [..., H], given h [..., H] and the true tokens [..., K]."""
        vectors, options = self.vectors(tokens), self.options
        read = cast(torch.Tensor, tokens).unbind(-1) if options.own_embedding else unit_scale(vectors).unbind(-2)
        state, factor, features = scaled(h, options), token_factor(self.config, options), []
        for k in range(self.config.num_heads):
            head: Any = self.head(k)
            state = (head.first if k == 0 else head.later)(state)
            state = next_state(state, head.token(read[k]), head.norm, factor)
            features.append(head.features(state))
        return features


class SpeculatorLevels(LevelHeads):
    """MLP speculators: a node's state is theirs, [M, I]."""

    def __init__(self, heads: DraftHeads, **kwargs: Any) -> None:
        super().__init__(heads, **kwargs)
        self.options, self.factor = heads.options, token_factor(heads.config, heads.options)
        modules: list[Any] = [heads.head(k) for k in range(heads.config.num_heads)]
        self._state = [self.frozen(head.later if k else head.first) for k, head in enumerate(modules)]
        self._token = [self.frozen(head.token) for head in modules]
        self._norm = [self.frozen(head.norm) for head in modules]
        self._out = [self.frozen(head.out) if hasattr(head, "out") else None for head in modules]
        self._blocks = [self.frozen_blocks(head.blocks) for head in modules]

    def start(self, h: torch.Tensor, root: torch.Tensor) -> torch.Tensor:
        """The first states: h [M, H] and the roots' tokens to [M, I]."""
        return self.descend(0, scaled(h, self.options), root)

    def descend(self, depth: int, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The next states: [M, I] and a token each to [M, I]."""
        read = tokens if self.options.own_embedding else unit_scale(self.embedding(tokens))
        return next_state(self._state[depth](state), self._token[depth](read), self._norm[depth], self.factor)

    def features(self, depth: int, state: torch.Tensor) -> torch.Tensor:
        """States [M, I] to what the LM head reads, [M, H] or [M, I]."""
        out = self._out[depth]
        return self._blocks[depth](state if out is None else out(state))


def scaled(h: torch.Tensor, options: SpeculatorOptions) -> torch.Tensor:
    """h [..., H] as the first head reads it."""
    return unit_scale(h) / math.sqrt(2) if options.scale_input else h


def token_factor(config: HeadsConfig, options: SpeculatorOptions) -> float:
    """a: how much a token's vector counts beside the state."""
    kept = 0.5 ** (0.5 / config.num_heads)
    return math.sqrt((1 - kept**2) * (options.inner_size or config.hidden_size) / 2) / kept


def next_state(state: torch.Tensor, vector: torch.Tensor, norm: Linear, factor: float) -> torch.Tensor:
    """GELU(norm(state + factor * vector)), all [..., I]; both have passed their linears."""
    return nn.functional.gelu(norm(torch.add(state, vector, alpha=factor)))
