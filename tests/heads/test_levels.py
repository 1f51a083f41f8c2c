"""The decoding form of sequential heads gives the modules' logits, level by level."""

import pytest
import torch

from medusa_spec.heads import LEVELS, HeadsConfig, Projection, TokenEmbedding, make_heads
from medusa_spec.heads.config import LM_HEADS, RESIDUALS

H, V, K = 8, 20, 3
DRAFT = torch.tensor([0, 2, 3, 7, 12, 18])


@pytest.mark.parametrize("draft", [False, True], ids=["all", "draft"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("lm_head", LM_HEADS)
@pytest.mark.parametrize(
    ("kind", "residual"), [(k, r) for k in LEVELS for r in RESIDUALS if k == "hydra" or r == "identity"]
)
def test_levels_give_the_modules_logits_along_every_path(kind, residual, lm_head, layers, draft):
    whole = Projection(
        weight=torch.randn(V, H, dtype=torch.float64), bias=torch.randn(V, dtype=torch.float64), scale=0.7, softcap=3.0
    )
    ids = DRAFT if draft else None
    size = len(DRAFT) if draft else None
    config = HeadsConfig(
        hidden_size=H,
        vocab_size=V,
        kind=kind,
        num_heads=K,
        num_layers=layers,
        lm_head=lm_head,
        rank=4,
        residual=residual,
        draft_vocab_size=size,
    )
    embedding = TokenEmbedding(weight=torch.randn(V, H, dtype=torch.float64), scale=2.0)
    heads = make_heads(config, whole.rows(ids), ids, embedding).double()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    levels = LEVELS[kind](heads, dtype=torch.float64, device=torch.device("cpu"))
    h, paths = torch.randn(H, dtype=torch.float64), torch.randint(0, V, (4, K))
    paths[:, 0] = 5  # all below one root
    expected = heads(h.expand(4, -1), paths)
    state = levels.start(h, paths[:1, 0])
    torch.testing.assert_close(levels.logits(0, state)[0], expected[0, 0])
    state = state.expand(4, -1)
    for depth in range(1, K):
        state = levels.descend(depth, state, paths[:, depth])
        torch.testing.assert_close(levels.logits(depth, state), expected[depth])
