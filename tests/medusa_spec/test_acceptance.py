import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from medusa_spec.acceptance import EXACT_SAMPLING, GREEDY, Rule, choose_greedy, choose_sampled, walk
from medusa_spec.testing import tiny
from medusa_spec.tree import TokenTree, chain, shape_of

ANSWER = [5, 7, 9, 2, 4]
"""What a scripted target says after the root, token by token."""

DRAWN = TokenTree(shape=shape_of((-1, 0, 1, 0)), tokens=(17, 5, 7, 9))
TREES = st.integers(0, 10).flatmap(
    lambda n: st.builds(
        lambda parents, tokens: TokenTree(shape=shape_of((-1, *parents)), tokens=(17, *tokens)),
        st.tuples(*(st.integers(0, i) for i in range(n))),
        st.lists(st.integers(0, 2), min_size=n, max_size=n),
    )
)


def scripted(tree: TokenTree) -> tuple[list[int], list[int]]:
    """Path and tokens of a target that always says `ANSWER`, whatever the draft."""
    accepted = walk(tree, lambda node: ANSWER[tree.shape.depths[node]])
    return list(accepted.path), list(accepted.tokens)


def test_a_draft_that_is_right_is_always_accepted() -> None:
    tree = TokenTree(shape=chain(4), tokens=(17, *ANSWER[:4]))
    assert scripted(tree) == ([0, 1, 2, 3, 4], ANSWER)


def test_a_draft_that_is_wrong_is_never_accepted_and_the_bonus_remains() -> None:
    tree = TokenTree(shape=chain(4), tokens=(17, 6, *ANSWER[1:4]))
    assert scripted(tree) == ([0], ANSWER[:1])


@pytest.mark.parametrize("right", [1, 2, 3])
def test_a_draft_is_accepted_as_far_as_it_is_right(right: int) -> None:
    tokens = [*ANSWER[:right], 99, *ANSWER[right + 1 : 4]]
    assert scripted(TokenTree(shape=chain(4), tokens=(17, *tokens))) == (
        list(range(right + 1)),
        ANSWER[: right + 1],
    )


def test_the_right_branch_is_taken_wherever_it_stands() -> None:
    tree = TokenTree(shape=shape_of((-1, 0, 0, 2, 2, 1)), tokens=(17, 6, 5, 8, 7, 7))
    assert scripted(tree) == ([0, 2, 4], ANSWER[:3])


@given(TREES, st.lists(st.integers(0, 2), min_size=12, max_size=12))
def test_what_comes_out_is_what_the_target_says(tree: TokenTree, says: list[int]) -> None:
    accepted = walk(tree, lambda node: says[tree.shape.depths[node]])
    assert list(accepted.tokens) == says[: len(accepted.tokens)]
    # The path is one of the tree, its tokens are those that came out, and only the bonus is in no node.
    assert accepted.path == tree.shape.path_to(accepted.path[-1])
    assert [tree.tokens[node] for node in accepted.path[1:]] == list(accepted.tokens[:-1])
    assert tree.child_with(accepted.path[-1], accepted.tokens[-1]) is None


@given(TREES, st.lists(st.integers(0, 2), min_size=12, max_size=12), st.data())
def test_correcting_a_draft_token_never_lowers_the_accepted_count(
    tree: TokenTree, says: list[int], data: st.DataObject
) -> None:
    def count(tree: TokenTree) -> int:
        return len(walk(tree, lambda node: says[tree.shape.depths[node]]).path)

    assume(tree.size > 1)
    node = data.draw(st.integers(1, tree.size - 1))
    right = says[tree.shape.depths[node] - 1]
    # Of two siblings with one token the walk takes the first: then nothing was corrected.
    assume(tree.child_with(tree.shape.parents[node], right) is None)
    corrected = TokenTree(shape=tree.shape, tokens=(*tree.tokens[:node], right, *tree.tokens[node + 1 :]))
    assert count(corrected) >= count(tree)


def test_a_token_that_ends_the_text_ends_the_walk() -> None:
    asked = []

    def choose(node: int) -> int:
        asked.append(node)
        return ANSWER[node]

    tree = TokenTree(shape=chain(4), tokens=(17, *ANSWER[:4]))
    accepted = walk(tree, choose, stop=lambda token: token == ANSWER[1])
    assert accepted.tokens == (5, 7) and accepted.path == (0, 1)
    assert asked == [0, 1]  # nothing is drawn for positions that do not exist


def test_the_drawing_in_the_docstring() -> None:
    accepted = walk(DRAWN, {0: 5, 1: 8}.__getitem__)
    assert (accepted.path, accepted.tokens) == ((0, 1), (5, 8))


def test_equal_logits_go_to_the_lowest_id() -> None:
    scores = torch.zeros(1, 200)
    scores[0, [150, 40, 180]] = 3.0
    assert choose_greedy(scores) == 40


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("llama")


def test_a_draw_is_the_draw_of_plain_sampling(model: PreTrainedModel) -> None:
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        scores = model(ids).logits[:, -1].float()
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 1, "attention_mask": torch.ones_like(ids)}
    drawn = []
    for seed in range(20):
        torch.manual_seed(seed)
        expected = int(model.generate(ids, **settings)[0, -1])
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        drawn.append(choose_sampled(scores))
        assert drawn[-1] == expected
        assert torch.equal(torch.get_rng_state(), state)
    assert len(set(drawn)) > 5


def test_draws_through_trees_follow_the_targets_distribution() -> None:
    # Chi-square over the 9 two-token texts of a 3-token vocabulary; the tree offers some of them, unevenly.
    tree = TokenTree(shape=shape_of((-1, 0, 0, 1)), tokens=(0, 2, 1, 0))
    first = torch.tensor([[0.5, 0.3, 0.2]])
    second = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]])
    draws, counts = 4000, torch.zeros(3, 3)
    for _ in range(draws):

        def choose(node: int) -> int:
            depth = tree.shape.depths[node]
            rows = first if depth == 0 else second[tree.tokens[node], None]
            return choose_sampled(rows.log())

        tokens = list(walk(tree, choose, stop=None).tokens)[:2]
        if len(tokens) == 1:  # not in the tree: the next pass draws there
            tokens.append(choose_sampled(second[tokens[0], None].log()))
        counts[tokens[0], tokens[1]] += 1
    expected = draws * first.T * second
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 26.1  # 8 degrees of freedom, p = 0.001; the seed is fixed


def test_rules_say_whether_they_are_lossless_and_may_be_batched() -> None:
    assert GREEDY.lossless and GREEDY.batched
    # Draws move the random state: one per emitted token and in order, or the seed would mean something else.
    assert EXACT_SAMPLING.lossless and not EXACT_SAMPLING.batched
    assert str(GREEDY) == "greedy (lossless)"
    assert str(Rule(name="typical", lossless=False, choose=choose_greedy)) == "typical (not lossless)"
