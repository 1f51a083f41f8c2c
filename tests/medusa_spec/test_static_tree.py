import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.acceptance import walk
from medusa_spec.static_tree import StaticTree
from medusa_spec.tree import TokenTree, chain, shape_of

CPU = torch.device("cpu")
PARENTS = st.integers(0, 12).flatmap(lambda n: st.tuples(st.just(-1), *(st.integers(0, i) for i in range(n))))


def distinct_siblings(parents: tuple[int, ...], dice: list[int]) -> TokenTree:
    """Tokens below 16, as drawn but for siblings, which differ."""
    shape, tokens = shape_of(parents), [0]
    for node in range(1, len(parents)):
        taken = {tokens[other] for other in range(1, node) if parents[other] == parents[node]}
        tokens.append(next(t % 16 for t in range(dice[node], dice[node] + 16) if t % 16 not in taken))
    return TokenTree(shape=shape, tokens=tuple(tokens))


@given(PARENTS, st.lists(st.integers(0, 2), min_size=13, max_size=13), st.lists(st.integers(0, 3), min_size=13))
def test_acceptance_by_mask_is_the_walk(parents, dice, choices):
    tree, choices = distinct_siblings(parents, dice), choices[: len(parents)]
    expected = walk(tree, choices.__getitem__)
    static = StaticTree(shape=tree.shape, device=CPU)
    last = static.accept(torch.tensor(tree.tokens), torch.tensor(choices))
    assert last.shape == (1,) and int(last) == expected.path[-1]
    path = static.paths[last][0].tolist()
    assert tuple(path[: len(expected.path)]) == expected.path
    assert [choices[node] for node in expected.path] == list(expected.tokens)


def test_the_drawing_holds():
    static = StaticTree(shape=shape_of((-1, 0, 1, 0)), device=CPU)
    assert static.paths.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 3, 2]]
    assert static.depths.tolist() == [0, 1, 2, 1] and static.parents.tolist() == [0, 0, 1, 0]
    assert static.places.tolist() == [0, 1, 2]
    tokens, choices = torch.tensor([17, 5, 7, 9]), torch.tensor([5, 8, 0, 0])
    assert static.accept(tokens, choices).tolist() == [1]


@given(PARENTS)
def test_places_behind_a_path_keep_what_lies_there(parents):
    shape = shape_of(parents)
    static = StaticTree(shape=shape, device=CPU)
    for node, depth in enumerate(shape.depths):
        row = static.paths[node].tolist()
        assert tuple(row[: depth + 1]) == shape.path_to(node)
        assert row[depth + 1 :] == list(range(depth + 1, shape.max_depth + 1))


def test_a_lone_root_is_always_accepted():
    static = StaticTree(shape=chain(0), device=CPU)
    assert static.accept(torch.tensor([3]), torch.tensor([4])).tolist() == [0]
