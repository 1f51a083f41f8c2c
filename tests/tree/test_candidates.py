"""Proposals of several drafters are one set of nodes, of which the best tree is taken."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from medusa_spec.tree import Candidates, Prices

CHAINS = st.lists(st.lists(st.tuples(st.integers(0, 3), st.floats(0.05, 1.0)), min_size=1, max_size=4), max_size=4)


def prices(*seconds, largest=9):
    times = tuple(zip((1, 3, largest), seconds or (1.0, 1.1, 1.9), strict=True))
    return Prices(token_seconds=1.0, level_seconds=0.0, pass_seconds=times)


def grafted(chains):
    candidates = Candidates()
    for chain in chains:
        candidates.graft([token for token, _ in chain], [chance for _, chance in chain])
    return candidates


def net(found, values):
    return sum(values) - (found.seconds(len(values) + 1) - found.seconds(1)) / found.token_seconds


def test_a_path_proposed_twice_is_one_and_the_surer_one_counts():
    candidates = Candidates()
    assert candidates.graft([5, 6], [0.5, 0.5]) == [1, 2]
    assert candidates.graft([5, 6, 7], [0.8, 0.25, 1.0]) == [1, 2, 3]
    assert candidates.tokens == [-1, 5, 6, 7] and candidates.parents == [-1, 0, 1, 2]
    assert candidates.values == pytest.approx([1.0, 0.8, 0.25, 0.25])


@given(CHAINS)
def test_siblings_carry_different_tokens_and_values_never_rise_along_a_path(chains):
    candidates = grafted(chains)
    pairs = list(zip(candidates.parents, candidates.tokens, strict=True))
    assert len(set(pairs)) == len(pairs)
    for node in range(1, len(candidates.values)):
        assert candidates.parents[node] < node
        assert candidates.values[node] <= candidates.values[candidates.parents[node]]


@given(CHAINS, st.lists(st.floats(0.5, 3.0), min_size=3, max_size=3), st.sampled_from([None, 0, 2, 20]))
def test_the_tree_taken_is_the_best_of_all_that_could_be(chains, seconds, limit):
    """Brute force over every set of nodes that holds its nodes' parents."""
    candidates, found = grafted(chains), prices(*seconds)
    nodes = range(1, len(candidates.values))
    assume(len(nodes) <= 12)
    most = min(len(nodes), found.largest, len(nodes) if limit is None else limit)
    best = 0.0
    for count in range(most + 1):
        for chosen in itertools.combinations(nodes, count):
            if all(candidates.parents[node] in (0, *chosen) for node in chosen):
                best = max(best, net(found, [candidates.values[node] for node in chosen]))
    tree = candidates.best(found, limit)
    assert len(tree.tokens) == tree.shape.size - 1 <= most
    gain = tree.expected - (found.seconds(tree.shape.size) - found.seconds(1)) / found.token_seconds
    assert gain == pytest.approx(best, abs=1e-9)


@given(CHAINS, st.integers(0, 6))
def test_a_larger_budget_never_expects_less(chains, limit):
    candidates, free = grafted(chains), prices(1.0, 1.0, 1.0)
    assert candidates.best(free, limit).expected <= candidates.best(free, limit + 1).expected
    assert candidates.best(free, limit).shape.size - 1 <= limit


def test_nodes_that_do_not_pay_are_left_out():
    candidates = grafted([[(1, 0.9), (2, 0.9)], [(3, 0.05)]])
    tree = candidates.best(prices(1.0, 1.2, 1.8))  # a node costs a tenth of a token
    assert tree.tokens == [1, 2] and tree.expected == pytest.approx(0.9 + 0.81)
