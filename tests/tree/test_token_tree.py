import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.tree import TokenTree, TreeShape, shape_of

TREES = st.integers(0, 10).flatmap(
    lambda n: st.builds(
        lambda parents, tokens: TokenTree(shape=shape_of((-1, *parents)), tokens=tuple(tokens)),
        st.tuples(*(st.integers(0, i) for i in range(n))),
        st.lists(st.integers(0, 3), min_size=n + 1, max_size=n + 1),
    )
)


def words(tree: TokenTree) -> list[tuple[int, ...]]:
    """Every node as the tokens on its path, in layout order."""
    return [tuple(tree.tokens[node] for node in tree.shape.path_to(end)) for end in range(tree.size)]


@given(TREES, st.integers(0, 5))
def test_cutting_leaves_the_nodes_down_to_a_depth_in_their_order(tree: TokenTree, depth: int) -> None:
    assert words(tree.cut(depth)) == [word for word in words(tree) if len(word) <= depth + 1]


@given(TREES)
def test_cutting_at_the_deepest_node_or_below_changes_nothing(tree: TokenTree) -> None:
    assert tree.cut(tree.shape.max_depth) is tree
    assert tree.cut(tree.shape.max_depth + 1) is tree


@given(TREES, st.integers(0, 3))
def test_the_child_found_carries_the_token(tree: TokenTree, token: int) -> None:
    for node in range(tree.size):
        carrying = [child for child in tree.shape.children[node] if tree.tokens[child] == token]
        assert tree.child_with(node, token) == (carrying[0] if carrying else None)


def test_a_lone_root_is_plain_decoding() -> None:
    tree = TokenTree.root_only(17)
    assert (tree.size, tree.tokens, tree.shape.children) == (1, (17,), ((),))


def test_a_token_per_node_is_demanded_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="3 nodes, got 2 ids"):
        TokenTree(shape=TreeShape(parents=(-1, 0, 0)), tokens=(1, 2))
