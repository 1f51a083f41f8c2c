import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.tree import ancestor_mask

PARENTS = st.integers(0, 12).flatmap(lambda n: st.tuples(st.just(-1), *(st.integers(0, i) for i in range(n))))


def ancestors(parents: tuple[int, ...], node: int) -> set[int]:
    """The node and all above it, by climbing."""
    seen = set()
    while node != -1:
        seen.add(node)
        node = parents[node]
    return seen


@given(PARENTS)
def test_a_node_sees_itself_and_its_ancestors_alone(parents: tuple[int, ...]) -> None:
    mask = ancestor_mask(parents)
    assert mask.dtype == torch.bool and mask.shape == (len(parents), len(parents))
    for node in range(len(parents)):
        assert set(mask[node].nonzero().flatten().tolist()) == ancestors(parents, node)


def test_a_chain_gives_the_causal_mask() -> None:
    assert torch.equal(ancestor_mask(range(-1, 6)), torch.ones(7, 7).tril().bool())


def test_the_drawing_in_the_docstring() -> None:
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    assert ancestor_mask((-1, 0, 1, 0)).int().tolist() == expected


def test_the_users_default_device_changes_nothing() -> None:
    with torch.device("meta"):
        assert ancestor_mask((-1, 0, 1, 0)).device.type == "cpu"
