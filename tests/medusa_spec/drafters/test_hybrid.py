"""Heads and look-up make one tree, and heads are not asked where they could not pay."""

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from medusa_spec.drafters import Drafter, DraftSession, HeadsDrafter, HybridDrafter, ReadStates, SuffixDrafter
from medusa_spec.drafters.hybrid import HeadsRecord
from medusa_spec.heads import HeadsConfig, MedusaHeads, Projection
from medusa_spec.tree import Candidates, Growth, Prices, TokenTree, chain, chain_template

LOOP = [1, 2, 3, 4, 5, 9] * 3 + [1, 2, 3, 4]
FREE = Prices(token_seconds=1.0, level_seconds=0.0, pass_seconds=((1, 1.0), (13, 1.0)))
SLOW_LEVELS = Prices(token_seconds=1.0, level_seconds=0.9, pass_seconds=((1, 1.0), (13, 1.1)))


class Heads(Drafter):
    """Guesses 7 8 below every root, with chances or without."""

    name = "heads"
    reads = (1,)
    level_share = 0.25

    def __init__(self, chances: tuple[float, float] | None = (0.6, 0.5)) -> None:
        self.chances = chances
        self.log: list[Any] = []

    def begin(self, prompt: Sequence[int]) -> DraftSession:
        return _Session(self)


class _Session(DraftSession):
    def __init__(self, drafter: Heads) -> None:
        self.drafter = drafter

    def propose(self, root: int, h: torch.Tensor | None, candidates: Candidates) -> bool:
        self.drafter.log.append("propose")
        if self.drafter.chances is None:
            return False
        candidates.graft([7, 8], self.drafter.chances)
        return True

    def draft(self, root: int, h: torch.Tensor | None, limit: int | None) -> TokenTree:
        self.drafter.log.append("draft")
        nodes = 2 if limit is None else min(2, limit)
        return TokenTree(shape=chain(nodes), tokens=(root, 7, 8)[: 1 + nodes])

    def read(self, ids: Sequence[int], states: ReadStates) -> None:
        self.drafter.log.append(("read", list(ids)))

    def forget(self) -> None:
        self.drafter.log.append("forget")

    def price(self, prices: Prices) -> None:
        self.drafter.log.append(prices)

    def observe(self, tokens: Sequence[int]) -> None:
        self.drafter.log.append(("observe", list(tokens)))


def begin(heads: Heads, ids: list[int], prices: Prices | None = FREE, **settings: Any) -> DraftSession:
    session = HybridDrafter(heads, SuffixDrafter(**settings)).begin(ids)
    if prices is not None:
        session.price(prices)
        heads.log.clear()
    return session


def chains(tree: TokenTree) -> list[list[int]]:
    return [[tree.tokens[node] for node in tree.shape.path_to(leaf)[1:]] for leaf in tree.shape.leaves()]


def test_both_are_in_one_tree_and_what_both_propose_is_one_node() -> None:
    tree = begin(Heads(), LOOP, max_depth=2).draft(4, None, None)
    assert sorted(chains(tree)) == [[5, 9], [7, 8]]
    tree = begin(Heads(), [*LOOP, 6, 8, 7, 8, 7, 6, 8], max_depth=2).draft(8, None, None)
    assert chains(tree) == [[7, 8]]


@pytest.mark.parametrize("limit", [0, 1, 2, 3, None])
@pytest.mark.parametrize("chances", [(0.6, 0.5), None], ids=["chances", "template"])
@pytest.mark.parametrize("ids", [LOOP, [1, 2, 3]], ids=["loop", "new"])
def test_no_more_nodes_than_the_limit_are_drafted(limit, chances, ids) -> None:
    tree = begin(Heads(chances), ids).draft(ids[-1], None, limit)
    assert tree.tokens[0] == ids[-1]
    assert tree.size - 1 <= 12 if limit is None else tree.size - 1 <= limit
    assert (tree.size == 1) == (limit == 0)


def test_the_budget_goes_to_the_nodes_that_gain_most() -> None:
    sure, unsure = Heads((0.99, 0.98)), Heads((0.3, 0.2))
    assert chains(begin(sure, LOOP).draft(4, None, 2)) == [[7, 8]]
    assert chains(begin(unsure, LOOP).draft(4, None, 2)) == [[5, 9]]


def test_heads_without_chances_draft_alone_where_look_up_expects_less_than_they_gained() -> None:
    heads = Heads(None)
    assert chains(begin(heads, LOOP).draft(4, None, None))[0][:2] == [5, 9]
    assert "draft" not in heads.log
    assert chains(begin(heads, [1, 2, 3]).draft(3, None, None)) == [[7, 8]]
    drafter = HybridDrafter(heads, SuffixDrafter())
    for _ in range(200):
        drafter.record.add(2, 2)
    assert chains(drafter.begin([1, 2, 3, 4, 1, 2]).draft(2, None, None)) == [[7, 8]]


def test_heads_are_not_asked_where_look_up_is_surer_than_their_time_is_worth() -> None:
    heads = Heads()
    session = begin(heads, LOOP, SLOW_LEVELS)
    assert chains(session.draft(4, None, None))[0][:2] == [5, 9]
    assert heads.log == []
    session.observe([99])
    session.draft(99, None, None)
    assert heads.log == [("observe", [99]), "propose"]


def test_heads_that_gained_nothing_are_asked_again_where_nothing_else_is_proposed() -> None:
    """Whether drafts of heads pay is the controller's affair: who does not try them would never learn it."""
    heads = Heads()
    session = begin(heads, [1, 2, 3], prices=SLOW_LEVELS)
    session.record.gain = 0.0  # type: ignore[attr-defined]
    session.draft(3, None, None)
    assert "propose" in heads.log


def test_what_is_drafted_for_nothing_is_the_look_ups() -> None:
    heads = Heads()
    session = begin(heads, LOOP, max_depth=2)
    assert chains(session.draft_free(4, None)) == [[5, 9]] and heads.log == [] and session.levels == 0
    assert session.draft_free(4, 1).size == 2
    assert begin(Heads(), [1, 2, 3]).draft_free(3, None).size == 1


def test_heads_that_cost_nothing_are_always_asked() -> None:
    heads = Heads()
    begin(heads, LOOP).draft(4, None, None)
    assert heads.log == ["propose"]


def test_gains_of_the_heads_are_counted_where_they_drafted_alone() -> None:
    drafter = HybridDrafter(Heads(), SuffixDrafter(session_tokens=0))
    for number in range(300):
        session = drafter.begin([1, 2, 3])
        session.draft(3, None, None)
        session.observe([7, 8, 3] if number % 2 else [7, 3])
    assert drafter.record.gain == pytest.approx(1.5, abs=0.1)
    assert drafter.record.levels == pytest.approx(2.0, abs=0.1)
    before = drafter.record.gain
    session = drafter.begin(LOOP)
    session.draft(4, None, None)
    session.observe([5, 9, 1, 2, 3, 4, 5, 9, 1])
    assert drafter.record.gain == before


def test_what_heads_would_gain_beside_nothing_is_what_they_gained_and_beside_certainty_nothing() -> None:
    record = HeadsRecord()
    assert record.gain_beside(Candidates()) == pytest.approx(record.gain)
    gains = []
    for chance in (0.0, 0.3, 0.9, 1.0):
        candidates = Candidates()
        candidates.graft([5] * 30, [chance] + [1.0] * 29)
        gains.append(record.gain_beside(candidates))
    assert gains == sorted(gains, reverse=True)
    assert gains[0] == pytest.approx(record.gain) and gains[-1] == pytest.approx(0.0, abs=1e-6)


def test_all_that_is_told_reaches_both() -> None:
    heads = Heads()
    drafter = HybridDrafter(heads, SuffixDrafter())
    assert drafter.reads == (1,) and drafter.level_share == 0.25 and drafter.expected() is None
    session = drafter.begin([1, 2, 3])
    states = ReadStates(h=torch.zeros(2, 4))
    session.read([1, 2], states)
    session.price(FREE)
    session.observe([4, 1, 2])
    session.forget()
    assert heads.log == [("read", [1, 2]), FREE, ("observe", [4, 1, 2]), "forget"]
    assert 3 in session.draft(2, None, None).tokens  # look-up has read the same


def test_prices_are_those_of_calibrated_heads_until_others_are_told() -> None:
    heads = Heads()
    costly = Growth(token_seconds=1.0, level_seconds=0.0, pass_seconds=((1, 1.0), (9, 8.5)))
    heads.growth = costly
    assert begin(heads, LOOP, None).draft(4, None, None).size < 3
    assert begin(heads, LOOP, FREE).draft(4, None, None).size > 9


def test_a_hybrid_proposes_into_a_pool_as_its_parts_do() -> None:
    candidates = Candidates()
    assert begin(Heads(), LOOP, max_depth=2).propose(4, None, candidates)
    assert candidates.tokens[1:] == [5, 9, 7, 8]
    assert not begin(Heads(None), [1, 2, 3]).propose(3, None, Candidates())


def test_a_copy_and_a_pickle_draft_the_same() -> None:
    projection = Projection(weight=torch.randn(30, 8, dtype=torch.float64))
    heads = MedusaHeads(HeadsConfig(hidden_size=8, vocab_size=30, num_heads=2), projection).double()
    made = HeadsDrafter(heads, chain_template(2), dtype=torch.float64, device=torch.device("cpu"))
    drafter, h = HybridDrafter(made), torch.randn(8, dtype=torch.float64)
    for ids in (LOOP, [1, 2, 3]):
        expected = drafter.begin(ids).draft(ids[-1], h, None)
        assert expected.size > 1
        for twin in (copy.copy(drafter), copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
            assert twin.begin(ids).draft(ids[-1], h, None) == expected
