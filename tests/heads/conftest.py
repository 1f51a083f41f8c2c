"""Heads of any family, fresh or with random weights, in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from medusa_spec.heads import DraftHeads, HeadsConfig, Projection, TokenEmbedding, make_heads

H, V, K = 8, 20, 3
DRAFT = torch.tensor([0, 2, 3, 7, 12, 18])


def build(
    kind: str,
    *,
    lm_head: Any = "shared",
    layers: int = 1,
    heads: int = K,
    trained: bool = False,
    draft: bool = False,
    hidden: int = H,
    lm_bias: bool = False,
    softcap: float | None = None,
    residual: Any = "identity",
    **options: Any,
) -> tuple[DraftHeads, Projection]:
    """See `make`."""
    rows = torch.randn(V, hidden, dtype=torch.float64)
    offset = torch.randn(V, dtype=torch.float64) if lm_bias else None
    ids = DRAFT if draft else None
    whole = Projection(weight=rows, bias=offset, scale=0.5, softcap=softcap).rows(ids)
    embedding = TokenEmbedding(weight=torch.randn(V, hidden, dtype=torch.float64), scale=2.0)
    config = HeadsConfig(
        hidden_size=hidden,
        vocab_size=V,
        kind=kind,
        num_heads=heads,
        num_layers=layers,
        lm_head=lm_head,
        rank=4,
        draft_vocab_size=len(DRAFT) if draft else None,
        residual=residual,
        options=options,
    )
    made = make_heads(config, whole, ids, embedding).double()
    if trained:
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return made, whole


@pytest.fixture(scope="session")
def make() -> Callable[..., tuple[DraftHeads, Projection]]:
    """`make("eagle", trained=True, tied=False)`: heads of a family and the LM head's rows that they guess by; further
    arguments are its options."""
    return build
