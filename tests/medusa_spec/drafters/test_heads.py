import copy
import itertools
import math
import pickle
from typing import Any

import pytest
import torch

from medusa_spec.drafters import DraftSession, HeadsDrafter, ReadStates
from medusa_spec.errors import ConfigError
from medusa_spec.heads import DraftHeads, HeadsConfig, MedusaHeads, Projection
from medusa_spec.tree import Candidates, Growth, PathValues, Prices, TreeTemplate, chain_template

H, V, K = 8, 30, 3
DRAFT = torch.tensor([2, 3, 11, 17, 23, 29])
TEMPLATE = TreeTemplate(paths=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
CPU = torch.device("cpu")
RULES = Growth(token_seconds=1.0, level_seconds=0.0, pass_seconds=((1, 1.0), (9, 1.0)), hit=1.0)


def heads(*, draft: bool = False) -> MedusaHeads:
    """Heads with random weights, in float64."""
    ids = DRAFT if draft else None
    whole = Projection(weight=torch.randn(V, H, dtype=torch.float64))
    config = HeadsConfig(hidden_size=H, vocab_size=V, num_heads=K, draft_vocab_size=len(DRAFT) if draft else None)
    made = MedusaHeads(config, whole.rows(ids), ids).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def drafter(made: DraftHeads, template: TreeTemplate = TEMPLATE, values: PathValues | None = None) -> HeadsDrafter:
    return HeadsDrafter(made, template, values, dtype=torch.float64, device=CPU)


@pytest.mark.parametrize("draft", [False, True], ids=["all", "draft"])
def test_each_node_carries_its_heads_guess_of_its_rank(draft: bool) -> None:
    made = heads(draft=draft)
    h = torch.randn(H, dtype=torch.float64)
    tree = drafter(made).begin([]).draft(7, h, None)
    order = made(h).argsort(dim=-1, descending=True)
    ranked = DRAFT[order] if draft else order
    expected = [int(ranked[len(path) - 1, path[-1]]) for path in TEMPLATE.paths]
    assert tree.shape == TEMPLATE.shape
    assert tree.tokens == (7, *expected)


def test_a_limit_takes_the_best_tree_of_that_size_where_counts_are_known() -> None:
    values = PathValues(total=100, counts={(0,): 50, (0, 0): 40, (1,): 5, (0, 0, 0): 35}, singles=((50, 5),) * K)
    limited = drafter(heads(), values=values)
    assert limited.limited(3).paths == ((0,), (0, 0), (0, 0, 0))
    assert limited.limited(3) is limited.limited(3)  # searched once


def test_a_limit_without_counts_cuts_the_template_shallow_nodes_first() -> None:
    assert set(drafter(heads()).limited(4).paths) == {(0,), (1,), (2,), (0, 0)}


@pytest.mark.parametrize("limit", [0, 1, 2, 5, 7, 100, None])
def test_no_more_nodes_than_the_limit_are_drafted(limit: int | None) -> None:
    tree = drafter(heads()).begin([]).draft(7, torch.randn(H, dtype=torch.float64), limit)
    assert tree.size - 1 == min(7 if limit is None else limit, 7)


def test_without_a_hidden_state_nothing_is_drafted() -> None:
    assert drafter(heads()).begin([]).draft(7, None, None).tokens == (7,)


def test_drafting_leaves_no_state_behind() -> None:
    made = drafter(heads())
    h = torch.randn(H, dtype=torch.float64)
    session = made.begin([1, 2])
    first = session.draft(7, h, None)
    session.observe([7, 8])
    assert session.draft(7, h, None) == made.begin([]).draft(7, h, None) == first


def test_a_template_deeper_than_the_heads_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="at most 3 deep.* got depth 4"):
        drafter(heads(), chain_template(4))


def test_a_template_wider_than_the_draft_vocabulary_is_refused_with_both_numbers() -> None:
    wide = TreeTemplate(paths=tuple((rank,) for rank in range(7)))
    drafter(heads(), wide)
    with pytest.raises(ConfigError, match="ranks below 6.* got rank 6"):
        drafter(heads(draft=True), wide)


def test_heads_that_were_trained_in_place_are_drafted_with() -> None:
    made = heads()
    drafting, h = drafter(made), torch.randn(H, dtype=torch.float64)
    stacked = drafting.stacked
    drafting.begin([])
    assert drafting.stacked is stacked  # nothing changed, nothing is made anew
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(-1.5)
    drafting.begin([])
    torch.testing.assert_close(drafting.stacked(h), made(h))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drafts_follow_the_dtype_of_h(dtype: torch.dtype) -> None:
    drafting = drafter(heads(draft=True))
    tree = drafting.begin([]).draft(7, torch.randn(H).to(dtype), None)
    assert tree.shape == TEMPLATE.shape and drafting.stacked.dtype == dtype


def test_a_copy_and_a_pickle_draft_the_same() -> None:
    drafting, h = drafter(heads(draft=True)), torch.randn(H, dtype=torch.float64)
    first = drafting.begin([]).draft(7, h, None)
    for other in (copy.deepcopy(drafting), pickle.loads(pickle.dumps(drafting))):
        assert other.begin([]).draft(7, h, None) == first


# --- heads that guess all at once, and trees that grow ----------------------------------------------------------------


def growing(made: DraftHeads, **changes: Any) -> HeadsDrafter:
    rules = Growth(**(RULES.to_dict() | changes))
    return HeadsDrafter(made, TEMPLATE, growth=rules, dtype=torch.float64, device=CPU)


@pytest.mark.parametrize("draft", [False, True], ids=["all", "draft"])
def test_a_tree_of_parallel_heads_holds_the_likeliest_paths_of_this_step(draft: bool) -> None:
    """An independent search: all products of calibrated chances, of which the largest are a tree."""
    made, h = heads(draft=draft), torch.randn(H, dtype=torch.float64) / 4
    chances = ((made(h) / 1.5).softmax(-1) * 0.9).detach()
    ids = DRAFT.tolist() if draft else list(range(V))
    values: dict[tuple[int, ...], float] = {}
    for depth in range(1, K + 1):
        for path in itertools.product(range(len(ids)), repeat=depth):
            values[tuple(ids[place] for place in path)] = math.prod(
                float(chances[head, place]) for head, place in enumerate(path)
            )
    tree = growing(made, temperature=1.5, coverage=0.9, width=6).begin([]).draft(7, h, None)
    expected = set(sorted(values, key=lambda path: -values[path])[:8])
    found = {tuple(tree.tokens[n] for n in tree.shape.path_to(node)[1:]) for node in range(1, tree.size)}
    assert found == expected and tree.tokens[0] == 7


def test_trees_of_parallel_heads_follow_their_confidence() -> None:
    made, h = heads(), torch.randn(H, dtype=torch.float64)
    dear: dict[str, Any] = {"pass_seconds": ((1, 1.0), (21, 4.0))}
    drafts = [growing(made, temperature=t, **dear).begin([]).draft(7, h, None) for t in (0.05, 1.0, 1000.0)]
    assert drafts[0].shape.max_depth == K and drafts[0].size == K + 1
    assert drafts[2].size == 1  # sure of nothing
    assert len({draft.shape for draft in drafts}) == 3


@pytest.mark.parametrize("limit", [0, 1, 2, 5, 7, 100, None])
def test_no_more_nodes_than_the_limit_grow_from_parallel_heads(limit: int | None) -> None:
    tree = growing(heads()).begin([]).draft(7, torch.randn(H, dtype=torch.float64), limit)
    assert tree.size - 1 == min(8 if limit is None else limit, 8)


def test_heads_that_pay_for_no_place_in_the_template_are_not_asked() -> None:
    made, h = heads(), torch.randn(H, dtype=torch.float64)
    drafting = growing(made, temperature=0.05)
    for depth in (3, 2, 1, 0):
        drafting.template = chain_template(depth) if depth else TreeTemplate(paths=())
        session, candidates = drafting.begin([]), Candidates()
        assert session.draft(7, h, None).shape.max_depth == depth
        assert session.propose(7, h, candidates) == (depth > 0) == (len(candidates.values) > 1)


def test_without_a_hidden_state_nothing_grows() -> None:
    session = growing(heads()).begin([])
    assert session.draft(7, None, None).tokens == (7,)
    assert not session.propose(7, None, Candidates())


def test_prices_of_the_moment_weigh_the_nodes_of_parallel_heads() -> None:
    session, h = growing(heads()).begin([]), torch.randn(H, dtype=torch.float64)
    assert session.draft(7, h, None).size == 9
    session.price(Prices(token_seconds=1.0, level_seconds=0.0, pass_seconds=((1, 1.0), (5, 9.0))))
    assert session.draft(7, h, None).size == 1


def test_parallel_heads_propose_what_they_would_draft_and_only_by_rules_of_growth() -> None:
    made, h = heads(), torch.randn(H, dtype=torch.float64)
    candidates = Candidates()
    session = growing(made).begin([])
    assert session.propose(7, h, candidates)
    assert tuple(candidates.best(RULES).tokens) == session.draft(7, h, None).tokens[1:]
    assert not drafter(made).begin([]).propose(7, h, Candidates())


def test_a_draft_of_fixed_form_fills_the_template_still() -> None:
    made, h = heads(), torch.randn(H, dtype=torch.float64)
    fixed = growing(made).begin([]).fixed(h, None)
    assert fixed is not None and fixed.shape == TEMPLATE.shape
    assert tuple(fixed.guess(h).tolist()) == drafter(made).begin([]).draft(7, h, None).tokens[1:]


# --- heads that attend ------------------------------------------------------------------------------------------------


def shown(made: HeadsDrafter, text: Any) -> DraftSession:
    """A session that was shown a whole text."""
    session = made.begin([])
    session.read(text.ids, text.states(0, len(text.ids)))
    return session


def test_a_drafter_reads_what_its_heads_read(attending) -> None:
    assert drafter(heads()).reads is None  # h of the root is handed to each draft
    assert drafter(attending("eagle")).reads == ()
    assert drafter(attending("eagle3", taps="0,3")).reads == (0, 3)


@pytest.mark.parametrize("limit", [0, 1, 2, 5, 7, 100, None])
@pytest.mark.parametrize("growth", [None, RULES], ids=["template", "growth"])
def test_no_more_nodes_than_the_limit_are_drafted_from_a_text(attending, text_of, limit, growth) -> None:
    made = attending("eagle")
    drafting = HeadsDrafter(made, TEMPLATE, growth=growth, dtype=torch.float64, device=CPU)
    tree = shown(drafting, text_of(made, 5)).draft(7, None, limit)
    most = 7 if growth is None else 8
    assert tree.size - 1 == min(most if limit is None else limit, most) and tree.tokens[0] == 7


def test_heads_that_attend_learn_how_far_their_chances_hold(attending, text_of) -> None:
    made = attending("eagle")
    drafting = HeadsDrafter(made, TEMPLATE, growth=RULES, dtype=torch.float64, device=CPU)
    for right in (True, False):
        session: Any = shown(drafting, text_of(made, 5))
        tree = session.draft(7, None, None)
        first = session.chosen.said[0][0]
        session.observe([first if right else next(token for token in range(V) if token not in tree.tokens)])
        assert session.trust.shift > 0 if right else session.trust.shift < 0


def test_before_a_text_is_shown_and_after_it_is_forgotten_nothing_is_drafted(attending, text_of) -> None:
    made = attending("eagle")
    session, text = drafter(made).begin([]), text_of(made, 5)
    assert session.draft(7, torch.randn(H, dtype=torch.float64), None).tokens == (7,)
    session.read(text.ids, text.states(0, 5))
    first = session.draft(7, None, None)
    session.forget()
    assert session.draft(7, None, None).tokens == (7,)
    session.read(text.ids, text.states(0, 5))
    assert session.draft(7, None, None) == first and first.shape == TEMPLATE.shape


def test_a_tree_without_nodes_is_plain_decoding(attending, text_of) -> None:
    made = attending("eagle")
    drafting = drafter(made, TreeTemplate(paths=()))
    assert shown(drafting, text_of(made, 5)).draft(7, None, None).tokens == (7,)


def test_sessions_of_one_drafter_know_nothing_of_each_other(attending, text_of) -> None:
    made = attending("eagle3", taps="1", tied=False)
    drafting, texts = drafter(made), [text_of(made, length) for length in (5, 9)]
    alone = [shown(drafting, text).draft(7, None, None) for text in texts]
    sessions = [shown(drafting, text) for text in texts]
    assert [session.draft(7, None, None) for session in sessions] == alone and alone[0] != alone[1]


def test_a_text_has_no_draft_of_fixed_form(attending, text_of) -> None:
    made = attending("eagle")
    assert shown(drafter(made), text_of(made, 5)).fixed(torch.randn(H, dtype=torch.float64), None) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drafts_of_texts_follow_the_dtype_of_the_states(attending, text_of, dtype: torch.dtype) -> None:
    made = attending("eagle3", taps="0,1")
    drafting, text = drafter(made), text_of(made, 5)
    states = text.states(0, 5)
    session = drafting.begin([])
    session.read(text.ids, ReadStates(h=states.h.to(dtype), layers=states.layers.to(dtype)))
    assert session.draft(7, None, None).shape == TEMPLATE.shape and drafting.stacked.dtype == dtype


def test_attending_heads_that_were_trained_in_place_are_drafted_with(attending, text_of) -> None:
    made = attending("eagle")
    drafting, text = drafter(made), text_of(made, 5)
    before = shown(drafting, text).draft(7, None, None)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(-1.5)
    after = shown(drafting, text).draft(7, None, None)
    assert after == shown(drafter(made), text).draft(7, None, None) != before


@pytest.mark.parametrize("growth", [None, RULES], ids=["template", "growth"])
def test_a_copy_and_a_pickle_of_attending_heads_draft_the_same(attending, text_of, growth) -> None:
    made = attending("eagle3", draft=True, taps="2")
    drafting = HeadsDrafter(made, TEMPLATE, growth=growth, dtype=torch.float64, device=CPU)
    text = text_of(made, 5)
    first = shown(drafting, text).draft(7, None, None)
    for other in (copy.deepcopy(drafting), pickle.loads(pickle.dumps(drafting))):
        assert shown(other, text).draft(7, None, None) == first
