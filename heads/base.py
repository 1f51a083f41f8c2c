"""What all families of heads share: config, the target's LM head, the draft vocabulary. Knows no family."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, cast

import torch
from torch import nn

from medusa_spec.heads.config import HeadsConfig
from medusa_spec.heads.embedding import TokenEmbedding
from medusa_spec.heads.head import Head
from medusa_spec.heads.note import Note
from medusa_spec.heads.options import NoOptions, read_options
from medusa_spec.heads.projection import Projection


class DraftHeads(nn.Module, ABC):
    """K heads that guess tokens from the target's hidden state.

    Head k (from 0) sees h at position t, from which the target chose token t + 1, and guesses token t + 2 + k. Heads of
    *sequential* families also see the tokens t + 1 … t + 1 + k: those that stand before the one they guess. Families
    that *attend* also see the text up to t, see `AutoregressiveHeads`; those that *mimic* guess h itself on the way.

    Args:
        config: Sizes and the kind of LM head.
        projection: The target's LM head restricted to `draft_ids`; it is not part of the heads' state.
        draft_ids: Int64 [draft vocabulary], target ids of the tokens that the heads guess, rising; None means all V.
        embedding: The target's input embeddings, for sequential families; not part of the heads' state.

    Raises:
        ValueError: If the projection or the draft vocabulary does not have the sizes that `config` says, or a
            sequential family is given no embedding, or if the family does not know an option.
    """

    Options: ClassVar[type[Any]] = NoOptions
    sequential: ClassVar[bool] = False
    attends: ClassVar[bool] = False
    mimics: ClassVar[bool] = False
    options: Any
    draft_ids: torch.Tensor | None
    heads: nn.ModuleList

    def __init__(
        self,
        config: HeadsConfig,
        projection: Projection,
        draft_ids: torch.Tensor | None = None,
        embedding: TokenEmbedding | None = None,
    ) -> None:
        super().__init__()
        expected = (config.num_draft_tokens, config.hidden_size)
        if tuple(projection.weight.shape) != expected:
            raise ValueError(
                f"projection.weight must be {expected} (draft vocabulary, hidden_size), got "
                f"{tuple(projection.weight.shape)}; were these heads made for another model?"
            )
        if (draft_ids is None) != (config.draft_vocab_size is None):
            raise ValueError("draft_ids must be given if, and only if, config.draft_vocab_size is set")
        if draft_ids is not None and draft_ids.numel() != config.draft_vocab_size:
            raise ValueError(
                f"draft_ids must hold draft_vocab_size = {config.draft_vocab_size} ids, got {draft_ids.numel()}"
            )
        if self.sequential and (embedding is None or embedding.weight.shape[1] != config.hidden_size):
            got = "none" if embedding is None else f"vectors of {embedding.weight.shape[1]}"
            raise ValueError(
                f"embedding must give vectors of hidden_size = {config.hidden_size} to {config.kind} heads, got {got}"
            )
        self.config = config
        self.options = read_options(self.Options, config.options, config.kind)
        self.projection = projection
        self.embedding = embedding if self.sequential else None
        self.heads = nn.ModuleList(self.make_head(k) for k in range(self.num_sets))
        self.register_buffer("draft_ids", draft_ids)
        self.calibration = Note()

    @classmethod
    def taps_of(cls, options: Any) -> tuple[int, ...]:
        """Layers of the target, by number and rising, whose inputs heads with these `Options` read beside h."""
        return ()

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose inputs the heads read beside h."""
        return self.taps_of(self.options)

    @property
    def num_sets(self) -> int:
        """Sets of weights: K, or one for all heads where the family has an option `tied` and it is set."""
        return 1 if getattr(self.options, "tied", False) else self.config.num_heads

    def head(self, k: int) -> Head:
        """The module of head k; where heads are tied it is that of all."""
        return cast(Head, self.heads[k % self.num_sets])

    @abstractmethod
    def make_head(self, k: int) -> Head:
        """Head k, as it begins."""

    @abstractmethod
    def features(self, h: torch.Tensor, tokens: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Features of every head, given the true tokens before the one it guesses.

        Args:
            h: [..., H], in the heads' dtype.
            tokens: Int64 [..., K], the tokens t + 1 … t + K; read by sequential families only.

        Returns:
            K tensors [..., H].
        """

    def forward(self, h: torch.Tensor, tokens: torch.Tensor | None = None, **given: Any) -> torch.Tensor:
        """Draft logits of every head, [K, ..., draft vocabulary]; arguments as for the family's `features`."""
        features = self.features(h, tokens, **given)
        return torch.stack([self.head(k).logits(z, self.projection) for k, z in enumerate(features)])

    def vectors(self, tokens: torch.Tensor | None) -> torch.Tensor:
        """The target's embeddings of the tokens [..., K] that sequential heads read: [..., K, H].

        Raises:
            ValueError: If there are none.
        """
        if tokens is None or self.embedding is None:
            raise ValueError(f"tokens must be given to {self.config.kind} heads: each sees those before its guess")
        return self.embedding(tokens)

    def _apply(self, fn: Any, recurse: bool = True) -> "DraftHeads":
        """Takes projection and embedding along when the heads are cast or moved: they are no parameters of theirs."""
        super()._apply(fn, recurse)
        self.projection = self.projection.map(fn)
        if self.embedding is not None:
            self.embedding = self.embedding.map(fn)
        return self
