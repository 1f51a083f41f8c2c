"""Heads that attend, with random weights, and texts for them to read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from medusa_spec.drafters import ReadStates
from medusa_spec.heads import AutoregressiveHeads, HeadsConfig, Projection, TokenEmbedding, make_heads

H, V, K = 8, 30, 4
DRAFT = torch.tensor([2, 3, 11, 17, 23, 29])


class Text:
    """A random text: what the target would have computed of it, and what heads make of it."""

    def __init__(self, heads: AutoregressiveHeads, length: int) -> None:
        self.heads, self.ids = heads, torch.randint(0, V, (length,)).tolist()
        self.h = torch.randn(length, H, dtype=torch.float64)
        taps = len(heads.taps)
        self.layers = torch.randn(length, taps, H, dtype=torch.float64) if taps else None

    def states(self, start: int, stop: int) -> ReadStates:
        """What a session is shown of the tokens from `start` up to `stop`."""
        return ReadStates(h=self.h[start:stop], layers=None if self.layers is None else self.layers[start:stop])

    def logits(self, read: int, draft: list[int], *, start: int = 0) -> torch.Tensor:
        """Teacher-forced draft logits [len(draft), draft vocabulary]: the draft begins behind the tokens that were
        read, and its first token is the root."""
        ids = [*self.ids[start:read], *draft, *[0] * K]
        rows = read - start
        tokens = torch.tensor([[ids[t + 1 + k] for k in range(K)] for t in range(rows)])
        given = [part[None, start:read] for part in (self.h, self.layers) if part is not None]
        features = self.heads.features(given[0], tokens[None], *given[1:])
        found = [self.heads.head(k).logits(features[k][0, -1], self.heads.projection) for k in range(len(draft))]
        return torch.stack(found).detach()


@pytest.fixture(scope="session")
def attending() -> Callable[..., AutoregressiveHeads]:
    """`attending("eagle3", taps="0,1", draft=True)`: random heads of a family that attends, in float64."""

    def make(kind: str, *, draft: bool = False, lm_head: Any = "shared", **options: Any) -> AutoregressiveHeads:
        ids = DRAFT if draft else None
        whole = Projection(weight=torch.randn(V, H, dtype=torch.float64), scale=0.7)
        config = HeadsConfig(
            hidden_size=H,
            vocab_size=V,
            kind=kind,
            num_heads=K,
            lm_head=lm_head,
            rank=3,
            draft_vocab_size=len(DRAFT) if draft else None,
            options=options,
        )
        embedding = TokenEmbedding(weight=torch.randn(V, H, dtype=torch.float64))
        heads = make_heads(config, whole.rows(ids), ids, embedding).double()
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
        assert isinstance(heads, AutoregressiveHeads)
        return heads

    return make


@pytest.fixture(scope="session")
def text_of() -> type[Text]:
    """`text_of(heads, length)`: a random text for them."""
    return Text
