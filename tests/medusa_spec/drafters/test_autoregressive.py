"""A session's draft is what the heads would have said of the text and the draft's tokens, taught and at once."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_spec.drafters import autoregressive, memory
from medusa_spec.drafters.autoregressive import TextDraft
from medusa_spec.drafters.choice import Choice, Chosen, GrowthChoice, TemplateChoice
from medusa_spec.drafters.levels import plan_of
from medusa_spec.heads.steps import DraftSteps
from medusa_spec.tree import Growth, TokenTree, TreeTemplate

H, V, K = 8, 30, 4
CPU = torch.device("cpu")
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {}),
    ("eagle", {"tied": False}),
    ("fused", {"taps": "0,2"}),
    ("eagle3", {"taps": "0,2", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}),
    ("eagle3", {"taps": "1", "tied": False}),
]
families = pytest.mark.parametrize(("kind", "options"), FAMILIES, ids=str)


def session_of(heads) -> TextDraft:
    return TextDraft(DraftSteps(heads, dtype=torch.float64, device=CPU))


class Forced(Choice):
    """Drafts nodes that were chosen beforehand, by path, and notes the logits below each.

    Args:
        nodes: Paths of tokens behind the root, prefix-closed; those that get children first, level by level.
    """

    def __init__(self, nodes: Sequence[tuple[int, ...]]) -> None:
        self.nodes, self.level = nodes, [()]
        self.found: dict[tuple[int, ...], torch.Tensor] = {}

    def take(self, depth: int, logits: torch.Tensor) -> Chosen | None:
        assert len(logits) == len(self.level)
        self.found |= dict(zip(self.level, logits, strict=True))
        following = [path for path in self.nodes if len(path) == depth + 1]
        if not following or depth + 1 == K:
            return None
        rows = [self.level.index(path[:-1]) for path in following]
        self.level = following
        return Chosen(rows=rows, tokens=torch.tensor([path[-1] for path in following]))

    def tree(self, root: int) -> TokenTree:
        return TokenTree.root_only(root)


def random_nodes(dice: random.Random, count: int) -> list[tuple[int, ...]]:
    """Paths of a random tree, parents first; siblings differ."""
    nodes: list[tuple[int, ...]] = [()]
    for _ in range(count):
        path = (*dice.choice(nodes), dice.randrange(V))
        if path not in nodes and len(path) < K:
            nodes.append(path)
    return nodes[1:]


@families
@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6)), min_size=1, max_size=6),
    st.integers(0, 2),
    st.randoms(),
    st.sampled_from([(512, 64), (3, 0)]),
)
def test_every_node_is_guessed_below_as_if_its_path_were_a_text(
    attending, text_of, kind, options, reads, start, dice, sizes
):
    """Over several reads, drafts that are left out, and memories that grow; where the text begins is no matter.

    A node sees its ancestors and no other node: the teacher-forced features know its path alone.
    """
    heads = attending(kind, **options)
    text, session, at = text_of(heads, 60), session_of(heads), start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoregressive, "READ_AT_ONCE", sizes[0])
        patch.setattr(memory, "ROOM", sizes[1])
        for count, nodes in reads:
            session.read(text.ids[at : at + count], text.states(at, at + count))
            at += count
            if not nodes:
                continue  # no draft here: what was read waits
            choice, root = Forced(random_nodes(dice, nodes)), text.ids[at]
            grow(session, root, choice)
            assert () in choice.found
            for path, logits in choice.found.items():
                expected = text.logits(at, [root, *path], start=start)[-1]
                torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)


@families
def test_a_draft_leaves_nothing_behind(attending, text_of, kind, options):
    """What a session says does not depend on what it drafted before, nor on how the text was shown to it."""
    heads = attending(kind, **options)
    text, nodes, found = text_of(heads, 13), random_nodes(random.Random(3), 9), []
    for step in (12, 1, 5):
        session = session_of(heads)
        for at in range(0, 12, step):
            stop = min(at + step, 12)
            session.read(text.ids[at:stop], text.states(at, stop))
            choice = Forced(nodes if stop == 12 else random_nodes(random.Random(at), 9))
            grow(session, text.ids[stop], choice)
            assert all(kept.length == kept.end for kept in session.memories)
        found.append(choice.found)
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for path, logits in other.items():
            torch.testing.assert_close(logits, found[0][path])


def test_before_anything_was_read_nothing_is_drafted(attending):
    session = session_of(attending("eagle"))
    assert grow(session, 7, Forced([(1,)])).tokens == (7,)


@families
@pytest.mark.parametrize("draft", [False, True], ids=["all", "draft"])
def test_a_template_is_filled_with_the_guesses_of_its_ranks(attending, text_of, kind, options, draft):
    heads = attending(kind, draft=draft, **options)
    text, session = text_of(heads, 9), session_of(heads)
    session.read(text.ids, text.states(0, 9))
    template = TreeTemplate(paths=((0,), (1,), (4,), (0, 0), (0, 2), (4, 1), (0, 2, 0), (4, 1, 1), (4, 1, 1, 3)))
    tree = grow(session, 7, TemplateChoice(template, plan_of(template, CPU), heads.draft_ids))
    assert tree.shape == template.shape and tree.tokens[0] == 7
    tokens = {(): 7} | dict(zip(template.paths, tree.tokens[1:], strict=True))
    for path in template.paths:
        logits = text.logits(9, [tokens[path[:depth]] for depth in range(len(path))])[-1]
        ranked = logits.argsort(descending=True)
        ranked = ranked if heads.draft_ids is None else heads.draft_ids[ranked]
        assert tokens[path] == int(ranked[path[-1]])


def grow(session: Any, root: int, choice: Any) -> TokenTree:
    return choice.tree(root) if session.guess(root, choice) else TokenTree.root_only(root)


RULES = Growth(token_seconds=1.0, level_seconds=0.0, pass_seconds=((1, 1.0), (40, 1.0)), hit=1.0, beam=3, width=4)


def names(heads: Any) -> list[int] | None:
    return None if heads.draft_ids is None else heads.draft_ids.tolist()


def rules(**changes: Any) -> Growth:
    return Growth(**(RULES.to_dict() | changes))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("coverage", [1.0, 0.6])
@pytest.mark.parametrize("draft", [False, True], ids=["all", "draft"])
@families
def test_a_tree_grows_by_the_calibrated_chances_of_its_paths(
    attending, text_of, kind, options, draft, coverage, temperature
):
    """An independent growth: the likeliest guesses below the likeliest nodes, level by level."""
    heads = attending(kind, draft=draft, **options)
    text, session = text_of(heads, 9), session_of(heads)
    session.read(text.ids, text.states(0, 9))
    growth = rules(temperature=temperature, coverage=coverage)
    choice = GrowthChoice(growth, K, None, names(heads))
    tree = grow(session, 7, choice)
    values: dict[tuple[int, ...], float] = {(): 1.0}
    level: list[tuple[int, ...]] = [()]
    for _ in range(K):
        fresh = {}
        for path in level:
            chances = (text.logits(9, [7, *path])[-1] / temperature).softmax(-1) * coverage
            for rank in chances.argsort(descending=True)[: growth.width].tolist():
                token = rank if heads.draft_ids is None else int(heads.draft_ids[rank])
                fresh[(*path, token)] = values[path] * float(chances[rank])
        values |= fresh
        level = sorted(fresh, key=lambda path: -fresh[path])[: growth.beam]
    expected = {path for path in values if path}
    kept = sorted(expected, key=lambda path: -values[path])[: growth.largest]
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, tree.size):
        paths.append((*paths[tree.shape.parents[node]], tree.tokens[node]))
    certain = {path for path in kept if values[path] > 1e-9}  # what adds nothing to a sum may be left out
    assert len(certain) > 5 and certain <= set(paths[1:]) <= set(kept) and tree.tokens[0] == 7


@pytest.mark.parametrize("limit", [1, 2, 5, None])
def test_a_limit_bounds_what_grows(attending, text_of, limit):
    heads = attending("eagle")
    text, session = text_of(heads, 5), session_of(heads)
    session.read(text.ids, text.states(0, 5))
    tree = grow(session, 7, GrowthChoice(RULES, K, limit, None))
    assert tree.size - 1 == min(39 if limit is None else limit, 39)


@pytest.mark.parametrize("deepest", [1, 2, 4])
def test_a_tree_is_no_deeper_than_there_are_steps(attending, text_of, deepest):
    heads = attending("eagle")
    text, session = text_of(heads, 5), session_of(heads)
    session.read(text.ids, text.states(0, 5))
    assert grow(session, 7, GrowthChoice(rules(width=1), deepest, None, None)).shape.max_depth == deepest


def test_a_draft_vocabulary_narrower_than_the_width_is_drafted_whole(attending, text_of):
    heads = attending("eagle", draft=True)
    text, session = text_of(heads, 5), session_of(heads)
    session.read(text.ids, text.states(0, 5))
    tree = grow(session, 7, GrowthChoice(rules(width=50), 1, None, names(heads)))
    assert sorted(tree.tokens[1:]) == heads.draft_ids.tolist()


def test_levels_that_do_not_pay_are_not_computed(attending, text_of):
    heads = attending("eagle", tied=False)
    text, session = text_of(heads, 9), session_of(heads)
    session.read(text.ids, text.states(0, 9))
    tree = grow(session, 7, GrowthChoice(rules(level_seconds=100.0), K, None, None))
    assert tree.shape.max_depth == 1
    assert [kept.length for kept in session.memories] == [9, 0, 0, 0]
