import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.tree import TreeShape, chain, merge_chains, shape_of

PARENTS = st.integers(0, 12).flatmap(lambda n: st.tuples(st.just(-1), *(st.integers(0, i) for i in range(n))))
CHAINS = st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=6)


@given(PARENTS)
def test_depth_is_the_mask_row_sum_less_one(parents: tuple[int, ...]) -> None:
    shape = TreeShape(parents=parents)
    assert list(shape.depths) == (shape.mask.sum(1) - 1).tolist()
    assert shape.max_depth == max(shape.depths)
    assert shape.size == len(parents)


@given(PARENTS)
def test_children_are_the_inverse_of_parents(parents: tuple[int, ...]) -> None:
    shape = TreeShape(parents=parents)
    pairs = [(child, node) for node, below in enumerate(shape.children) for child in below]
    assert sorted(pairs) == [(node, parents[node]) for node in range(1, len(parents))]
    assert all(list(below) == sorted(below) for below in shape.children)


@given(PARENTS)
def test_each_leaf_ends_one_path_and_the_paths_hold_every_node(parents: tuple[int, ...]) -> None:
    shape = TreeShape(parents=parents)
    paths = [shape.path_to(leaf) for leaf in shape.leaves()]
    for leaf in shape.leaves():
        assert sum(leaf in path for path in paths) == 1
    assert set().union(*paths) == set(range(shape.size))


@given(PARENTS)
def test_a_path_climbs_from_the_root_by_parents(parents: tuple[int, ...]) -> None:
    shape = TreeShape(parents=parents)
    for node in range(shape.size):
        path = shape.path_to(node)
        assert path[0] == 0 and path[-1] == node and len(path) == shape.depths[node] + 1
        assert all(parents[below] == above for above, below in zip(path, path[1:], strict=False))


@pytest.mark.parametrize("parents", [(), (0,), (-1, -1), (-1, 1), (-1, 2, 0), (-1, 0, -2)])
def test_parents_stand_before_children_below_one_root(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="parents"):
        TreeShape(parents=parents)


def test_the_message_names_the_node_out_of_order() -> None:
    with pytest.raises(ValueError, match=r"parents\[2\] must be in 0\.\.1 .* got 3"):
        TreeShape(parents=(-1, 0, 3, 0))


def test_equal_parents_are_one_shape() -> None:
    assert shape_of((-1, 0, 0)) is shape_of((-1, 0, 0))
    assert shape_of((-1, 0, 0)) == TreeShape(parents=(-1, 0, 0))
    assert hash(shape_of((-1, 0, 0))) == hash(TreeShape(parents=(-1, 0, 0)))


@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_chain_has_one_path(length: int) -> None:
    shape = chain(length)
    assert shape.leaves() == (length,)
    assert shape.path_to(length) == tuple(range(length + 1))


def test_a_chain_of_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="length .* got -1"):
        chain(-1)


@given(CHAINS)
def test_merged_chains_are_the_prefixes_of_the_chains_each_once(chains: list[list[int]]) -> None:
    shape, tokens = merge_chains(chains)
    words = [tuple(tokens[node - 1] for node in shape.path_to(end)[1:]) for end in range(shape.size)]
    prefixes = {tuple(chain[:end]) for chain in chains for end in range(len(chain) + 1)} | {()}
    assert len(words) == len(set(words))
    assert set(words) == prefixes


@given(CHAINS)
def test_the_first_chain_is_laid_out_first_and_contiguously(chains: list[list[int]]) -> None:
    shape, tokens = merge_chains(chains)
    first = chains[0] if chains else []
    assert tokens[: len(first)] == first
    assert shape.path_to(len(first)) == tuple(range(len(first) + 1))
