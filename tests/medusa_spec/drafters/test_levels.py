"""Level by level every node gets the guess of its rank, given the tokens on its path."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.drafters import HeadsDrafter
from medusa_spec.drafters.levels import plan_of
from medusa_spec.heads import LEVELS, HeadsConfig, Projection, TokenEmbedding, make_heads
from medusa_spec.tree import TreeTemplate, chain_template

H, V, K = 8, 30, 4
DRAFT = torch.tensor([2, 3, 11, 17, 23, 29])
CPU = torch.device("cpu")


FAMILIES = [
    *((kind, {}) for kind in LEVELS),
    ("mlp_speculator", {"tied": True, "own_embedding": True, "inner_size": 5}),
    ("recurrent", {"tied": False}),
]


def heads(kind, *, draft=False, options=None):
    ids = DRAFT if draft else None
    whole = Projection(weight=torch.randn(V, H, dtype=torch.float64))
    config = HeadsConfig(
        hidden_size=H,
        vocab_size=V,
        kind=kind,
        num_heads=K,
        draft_vocab_size=len(DRAFT) if draft else None,
        options=options or {},
    )
    made = make_heads(config, whole.rows(ids), ids, TokenEmbedding(weight=torch.randn(V, H, dtype=torch.float64)))
    made = made.double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


@st.composite
def templates(draw):
    """Prefix-closed sets of rank paths of at most K levels and four ranks."""
    paths = {()}
    for _ in range(draw(st.integers(1, 14))):
        parent = draw(st.sampled_from(sorted(path for path in paths if len(path) < K)))
        paths.add((*parent, draw(st.integers(0, 3))))
    return TreeTemplate(paths=tuple(paths - {()}))


@pytest.mark.parametrize("draft", [False, True], ids=["all", "draft"])
@pytest.mark.parametrize(("kind", "options"), FAMILIES)
@given(template=templates(), seed=st.integers(0, 99))
def test_every_node_carries_the_guess_of_its_rank_given_its_path(kind, options, draft, template, seed):
    torch.manual_seed(seed)
    made, h = heads(kind, draft=draft, options=options), torch.randn(H, dtype=torch.float64)
    tree = HeadsDrafter(made, template, dtype=torch.float64, device=CPU).begin([]).draft(7, h, None)
    assert tree.shape == template.shape and tree.tokens[0] == 7
    for node, path in enumerate(template.paths, start=1):
        above = [tree.tokens[place] for place in template.shape.path_to(node)[:-1]]
        given_tokens = torch.tensor(above + [0] * (K - len(above)))
        order = made(h, given_tokens)[len(path) - 1].argsort(descending=True)
        assert tree.tokens[node] == int((DRAFT[order] if draft else order)[path[-1]])


def test_a_plan_asks_for_no_guess_that_the_template_does_not_need():
    plan = plan_of(TreeTemplate(paths=((0,), (0, 0), (0, 1), (0, 1, 2), (1,))), CPU)
    assert [level.width for level in plan.levels] == [2, 2, 3]
    assert [level.slots.tolist() for level in plan.levels] == [[0, 1], [0, 1], [2]]
    assert [level.kept.tolist() for level in plan.levels] == [[0], [1], []]
    assert plan.order.tolist() == [0, 2, 3, 4, 1]
    assert len(plan_of(chain_template(3), CPU).levels) == 3
