from typing import Any

import pytest

from medusa_spec.drafters import NgramDrafter
from medusa_spec.errors import ConfigError
from medusa_spec.tree import TokenTree


def draft(ids: list[int], *, limit: int | None = None, **settings: Any) -> TokenTree:
    """The draft behind `ids`, the last of which is the root."""
    session = NgramDrafter(**settings).begin(ids[:-1])
    session.observe(ids[-1:])
    return session.draft(ids[-1], None, limit)


def chains(tree: TokenTree) -> list[list[int]]:
    """The draft's paths as tokens, the root left out."""
    return [[tree.tokens[node] for node in tree.shape.path_to(leaf)[1:]] for leaf in tree.shape.leaves()]


def test_what_followed_the_last_time_is_proposed() -> None:
    assert chains(draft([1, 2, 3, 4, 5, 9, 1, 2], max_nodes=3)) == [[3, 4, 5]]


def test_the_root_is_the_token_just_chosen() -> None:
    assert draft([1, 2, 3, 1, 2]).tokens[0] == 2


def test_nothing_is_proposed_where_nothing_matches() -> None:
    assert draft([1, 2, 3, 4, 5]).tokens == (5,)
    assert draft([7]).tokens == (7,)
    assert draft([1, 5, 2, 5]).tokens == (5,)  # one token alone is no match with min_ngram 2


def test_the_longest_match_comes_first() -> None:
    # (2, 3) was followed by 8 last, but (1, 2, 3) by 4.
    ids = [1, 2, 3, 4, 6, 2, 3, 8, 6, 1, 2, 3]
    assert chains(draft(ids, max_nodes=1)) == [[4]]
    assert chains(draft(ids, max_ngram=2, max_branches=1, max_nodes=1)) == [[8]]


def test_the_most_recent_match_comes_first_and_older_ones_branch_off() -> None:
    ids = [1, 2, 5, 6, 1, 2, 7, 8, 1, 2]
    assert chains(draft(ids, max_branches=1, max_nodes=2)) == [[7, 8]]
    assert chains(draft(ids, max_branches=2, max_nodes=4)) == [[7, 8], [5, 6]]


def test_matches_that_went_on_alike_share_their_nodes() -> None:
    tree = draft([1, 2, 5, 6, 1, 2, 5, 8, 1, 2], max_branches=2, max_nodes=4)
    assert chains(tree) == [[5, 8], [5, 6]]
    assert tree.size == 1 + 3


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5, None])
def test_limit_and_max_nodes_bound_the_draft(limit: int | None) -> None:
    tree = draft([1, 2, 5, 6, 7, 8, 9, 1, 2, 4, 3, 1, 2], limit=limit, max_nodes=4)
    assert tree.size - 1 <= min(4, 4 if limit is None else limit)
    assert (tree.size == 1) == (limit == 0)


def test_what_was_generated_is_looked_up_as_the_prompt_is() -> None:
    session = NgramDrafter(max_nodes=2).begin([1, 2])
    assert session.draft(2, None, None).size == 1
    for token in (3, 4, 9, 1, 2):
        session.observe([token])
    assert chains(session.draft(2, None, None)) == [[3, 4]]


def test_a_match_does_not_find_itself() -> None:
    # 5 5 5: the last (5, 5) also ended one place before, and 5 followed.
    assert chains(draft([5, 5, 5], max_nodes=4)) == [[5]]


def test_sessions_know_nothing_of_one_another() -> None:
    drafter = NgramDrafter()
    drafter.begin([1, 2, 3, 4])
    assert drafter.begin([1, 2]).draft(2, None, None).size == 1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"min_ngram": 0}, "min_ngram=0"),
        ({"min_ngram": 5, "max_ngram": 4}, "min_ngram=5 and max_ngram=4"),
        ({"max_nodes": 0}, "max_nodes"),
        ({"max_branches": 0}, "max_branches"),
    ],
)
def test_numbers_out_of_range_are_named(settings: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        NgramDrafter(**settings)
