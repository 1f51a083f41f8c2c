"""Questions of several drafts are asked together, and every draft gets its own answers."""

import pytest
import torch

from medusa_spec.drafters import HeadsDrafter, HybridDrafter
from medusa_spec.drafters.asking import Ask, alone, answered, together
from medusa_spec.heads import HeadsConfig, Projection, TokenEmbedding, make_heads
from medusa_spec.tree import Growth, TreeTemplate

H, V, K = 16, 40, 3
TREE = TreeTemplate(paths=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)))
GROWTH = Growth(token_seconds=1.0, level_seconds=0.01, pass_seconds=((1, 1.0), (2, 1.0), (64, 1.2)))


class Doubler:
    """Answers with twice the tensor; notes how many rows it was asked about at once."""

    def __init__(self):
        self.asked = []

    def times(self, factor, x):
        self.asked.append((factor, len(x)))
        return factor * x


def draft(doubler, rows, rounds, factor=2):
    x = torch.full((rows, 1), float(rows))
    for _ in range(rounds):
        x = yield Ask(to=doubler.times, settings=(factor,), of=(x,))
    return x.flatten().tolist()


def test_drafts_of_any_length_are_answered_together():
    doubler = Doubler()
    found = together({"a": draft(doubler, 1, 3), "b": draft(doubler, 2, 1), "c": draft(doubler, 3, 2)})
    assert found == {"a": [8.0], "b": [4.0, 4.0], "c": [12.0, 12.0, 12.0]} and list(found) == ["a", "b", "c"]
    assert doubler.asked == [(2, 6), (2, 4), (2, 1)]


def test_other_settings_and_others_are_asked_apart():
    one, other = Doubler(), Doubler()
    together({0: draft(one, 1, 1), 1: draft(other, 1, 1), 2: draft(one, 1, 1, factor=3)})
    assert sorted(one.asked) == [(2, 1), (3, 1)] and other.asked == [(2, 1)]


def test_a_draft_that_asks_nothing_is_done_at_once():
    assert alone(answered(7)) == 7
    assert together({}) == {}


@pytest.fixture(params=[("medusa", {}), ("medusa", {"num_layers": 2, "lm_head": "own"}), ("hydra", {})], ids=str)
def heads(request):
    kind, settings = request.param
    torch.manual_seed(1)
    config = HeadsConfig(kind=kind, num_heads=K, hidden_size=H, vocab_size=V, **settings)
    sequential = TokenEmbedding(weight=torch.randn(V, H)) if kind != "medusa" else None
    made = make_heads(config, Projection(weight=torch.randn(V, H)), None, sequential)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.double()


@pytest.mark.parametrize("growth", [None, GROWTH], ids=["static", "grown"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["heads", "hybrid"])
def test_rows_are_drafted_for_together_as_each_alone(heads, growth, hybrid):
    place = {"dtype": torch.float64, "device": torch.device("cpu")}
    drafter = HeadsDrafter(heads, TREE, growth=growth, **place)
    maker = HybridDrafter(drafter) if hybrid else drafter
    states = torch.randn(4, H, dtype=torch.float64)
    prompts = [[5, 6, 7, 8, 5, 6, 7], [3], [9, 9, 9], [1, 2, 1, 2]]
    expected = [maker.begin(ids).draft(ids[-1], h, None) for ids, h in zip(prompts, states, strict=True)]
    sessions = [maker.begin(ids) for ids in prompts]
    rows = zip(sessions, prompts, states, strict=True)
    found = together({row: own.drafting(ids[-1], h, None) for row, (own, ids, h) in enumerate(rows)})
    assert list(found.values()) == expected
    assert any(tree.size > 1 for tree in expected)


@pytest.mark.parametrize("hybrid", [False, True], ids=["heads", "hybrid"])
def test_a_session_learns_from_what_came_of_its_drafts_and_from_nothing_else(heads, hybrid):
    drafter = HeadsDrafter(heads, TREE, growth=GROWTH, dtype=torch.float64, device=torch.device("cpu"))
    maker, h = HybridDrafter(drafter) if hybrid else drafter, torch.randn(H, dtype=torch.float64)
    for right in (True, False):
        session = maker.begin([3])
        own = session.heads if hybrid else session
        tree = alone(session.drafting(3, h, None))
        first = own.chosen.said[0][0]
        assert first in tree.tokens[1:]
        session.observe([first if right else next(token for token in range(V) if token not in tree.tokens)])
        learnt = own.trust.shift
        assert learnt > 0 if right else learnt < 0
        session.observe([first])  # of a plain step
        assert own.trust.shift == learnt
    assert maker.begin([3]).draft(3, h, None) == tree, "another text begins with what the heads say"
