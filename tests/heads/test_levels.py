"""The decoding form of sequential heads gives the modules' logits, level by level."""

import pytest
import torch

from medusa_spec.heads import LEVELS, HeadsConfig, Projection, TokenEmbedding, make_heads
from medusa_spec.heads.config import LM_HEADS

H, V, K = 8, 20, 3
DRAFT = torch.tensor([0, 2, 3, 7, 12, 18])
FAMILIES = [
    ("hydra", {"residual": "linear"}),
    *((kind, {}) for kind in LEVELS),
    ("mlp_speculator", {"tied": True, "inner_size": 5}),
    ("mlp_speculator", {"own_embedding": True, "scale_input": False}),
    ("recurrent", {"tied": False, "inner_size": 5}),
]


def make(kind, *, lm_head="shared", layers=1, draft=False, options=None):
    """Sequential heads with random weights everywhere, in float64."""
    whole = Projection(
        weight=torch.randn(V, H, dtype=torch.float64), bias=torch.randn(V, dtype=torch.float64), scale=0.7, softcap=3.0
    )
    ids = DRAFT if draft else None
    options = dict(options or {})
    config = HeadsConfig(
        hidden_size=H,
        vocab_size=V,
        kind=kind,
        num_heads=K,
        num_layers=layers,
        lm_head=lm_head,
        rank=4,
        draft_vocab_size=len(DRAFT) if draft else None,
        residual=options.pop("residual", "identity"),
        options=options,
    )
    embedding = TokenEmbedding(weight=torch.randn(V, H, dtype=torch.float64), scale=2.0)
    heads = make_heads(config, whole.rows(ids), ids, embedding).double()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return heads


@pytest.mark.parametrize("draft", [False, True], ids=["all", "draft"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("lm_head", LM_HEADS)
@pytest.mark.parametrize(("kind", "options"), FAMILIES)
def test_levels_give_the_modules_logits_along_every_path(kind, options, lm_head, layers, draft):
    heads = make(kind, lm_head=lm_head, layers=layers, draft=draft, options=options)
    levels = LEVELS[kind](heads, dtype=torch.float64, device=torch.device("cpu"))
    h, paths = torch.randn(H, dtype=torch.float64), torch.randint(0, V, (4, K))
    paths[:, 0] = 5  # all below one root
    expected = heads(h.expand(4, -1), paths)
    state = levels.start(h[None], paths[:1, 0])
    torch.testing.assert_close(levels.logits(0, state)[0], expected[0, 0])
    state = state.expand(4, -1)
    for depth in range(1, K):
        state = levels.descend(depth, state, paths[:, depth])
        torch.testing.assert_close(levels.logits(depth, state), expected[depth])


@pytest.mark.parametrize(("kind", "options"), FAMILIES)
def test_levels_are_a_frozen_copy(kind, options):
    heads = make(kind, lm_head="own", layers=2, options=options)
    levels = LEVELS[kind](heads, dtype=torch.float64, device=torch.device("cpu"))

    def guesses():
        state = levels.start(h[None], torch.tensor([5]))
        return [levels.logits(0, state), levels.logits(1, levels.descend(1, state, torch.tensor([7])))]

    h = torch.randn(H, dtype=torch.float64)
    before = guesses()
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(one, other) for one, other in zip(guesses(), before, strict=True))
    assert not before[0].requires_grad


@pytest.mark.parametrize(("kind", "options"), FAMILIES)
def test_levels_compute_in_the_dtype_asked_for(kind, options):
    heads = make(kind, layers=2, options=options)
    levels = LEVELS[kind](heads, dtype=torch.bfloat16, device=torch.device("cpu"))
    state = levels.descend(1, levels.start(torch.randn(1, H).bfloat16(), torch.tensor([5])), torch.tensor([7]))
    assert state.dtype == levels.logits(1, state).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["mlp_speculator", "recurrent"])
def test_tied_weights_are_held_once(kind):
    made = []

    def linear(weight, bias):
        made.append(weight)
        return lambda x: torch.nn.functional.linear(x, weight, bias)

    heads = make(kind, lm_head="own", layers=2, options={"tied": True})
    LEVELS[kind](heads, dtype=torch.float64, device=torch.device("cpu"), linear=linear)
    assert len(made) == sum(isinstance(module, torch.nn.Linear) for module in heads.modules())
