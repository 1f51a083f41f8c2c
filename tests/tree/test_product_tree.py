"""Trees of parallel heads' guesses are the best that there are, and follow the heads' confidence."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.tree import Candidates, Prices, open_product

ROW = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3).map(lambda row: sorted(row, reverse=True))
TABLE = st.lists(ROW, min_size=1, max_size=3)
SMALL = st.lists(ROW.map(lambda row: row[:2]), min_size=1, max_size=3)
SHARES = st.lists(st.floats(0.0, 1.0), min_size=2, max_size=2)


def prices(shares=(0.05, 0.05), largest=14):
    """A node costs the first share of a token up to the third one, the second share more from there on."""
    first, second = shares
    times = ((1, 1.0), (3, 1.0 + 2 * first), (largest + 1, 1.0 + 2 * first + (largest - 2) * (first + second)))
    return Prices(token_seconds=1.0, level_seconds=0.0, pass_seconds=times)


def opened(table, *, price=0.0, limit=10_000, candidates=None):
    """Tokens name head and rank: 10 k + r."""
    candidates = Candidates() if candidates is None else candidates
    tokens = [[10 * head + rank for rank in range(len(row))] for head, row in enumerate(table)]
    open_product(candidates, tokens, table, price=price, limit=limit)
    return candidates


def every_path(table):
    """All rank paths of a table with their values."""
    found = {}
    for depth in range(1, len(table) + 1):
        for path in itertools.product(*(range(len(row)) for row in table[:depth])):
            value = 1.0
            for head, rank in enumerate(path):
                value *= table[head][rank]
            found[path] = value
    return found


def paths_of(candidates):
    """Rank path of every node."""
    return [tuple(token % 10 for token in path) for path in paths(candidates)]


def paths(candidates):
    """Tokens of every node's path."""
    found = [()]
    for parent, token in list(zip(candidates.parents, candidates.tokens, strict=True))[1:]:
        found.append((*found[parent], token))
    return found[1:]


def net(found, values):
    return sum(values) - (found.seconds(len(values) + 1) - found.seconds(1)) / found.token_seconds


@given(TABLE, st.integers(0, 30), st.floats(0.0, 0.5))
def test_the_nodes_opened_are_those_of_highest_value(table, limit, price):
    candidates = opened(table, limit=limit, price=price)
    worth = sorted((value for value in every_path(table).values() if value >= price), reverse=True)
    assert candidates.values[1:] == pytest.approx(worth[:limit])
    assert len(set(paths_of(candidates))) == len(candidates.values) - 1


@given(TABLE)
def test_values_are_products_and_never_rise_along_a_path(table):
    candidates, expected = opened(table), every_path(table)
    for node, path in enumerate(paths_of(candidates), start=1):
        assert candidates.values[node] == pytest.approx(expected[path])
        assert candidates.values[node] <= candidates.values[candidates.parents[node]]
        assert candidates.parents[node] < node


@given(SMALL, SHARES, st.sampled_from([None, 0, 1, 3, 20]))
def test_the_tree_is_the_best_of_all_that_could_be(table, shares, limit):
    """Brute force over every prefix-closed set of rank paths; passes that cost ever more per node."""
    found, expected = prices(shares), every_path(table)
    most = found.largest if limit is None else min(limit, found.largest)
    best = 0.0
    for closed in prefix_closed(list(expected)):
        if len(closed) <= most:
            best = max(best, net(found, [expected[path] for path in closed]))
    tree = opened(table, price=found.node_price, limit=most).best(found, limit)
    gain = tree.expected - (found.seconds(tree.shape.size) - found.seconds(1)) / found.token_seconds
    assert tree.shape.size - 1 <= most
    assert gain == pytest.approx(best, abs=1e-9)


def prefix_closed(paths):
    """All sets of paths that hold their paths' beginnings; paths stand behind their beginnings."""
    if not paths:
        return [frozenset()]
    *rest, last = sorted(paths, key=lambda path: (len(path), path))
    without = prefix_closed(rest)
    return without + [closed | {last} for closed in without if len(last) == 1 or last[:-1] in closed]


@given(TABLE, st.integers(0, 14))
def test_a_larger_budget_never_expects_less(table, limit):
    found = prices()
    smaller, larger = (
        opened(table, price=found.node_price, limit=most).best(found, most) for most in (limit, limit + 1)
    )
    assert smaller.expected <= larger.expected + 1e-12 and smaller.shape.size - 1 <= limit


@given(TABLE, st.lists(st.floats(0.0, 1.0), min_size=2, max_size=2))
def test_dearer_nodes_give_smaller_trees(table, shares):
    cheap, dear = (prices((share, 0.0)) for share in sorted(shares))
    sizes = [opened(table, price=p.node_price, limit=14).best(p).shape.size for p in (cheap, dear)]
    assert sizes[1] <= sizes[0]


def test_sure_heads_give_deep_trees_and_unsure_ones_wide_trees():
    found = prices((0.08, 0.0))
    sure = opened([[0.9, 0.05]] * 4, price=found.node_price, limit=14).best(found).shape
    unsure = opened([[0.3, 0.25, 0.2, 0.1]] * 4, price=found.node_price, limit=14).best(found).shape
    assert sure.max_depth == 4 and all(len(below) <= 1 for below in sure.children)
    assert unsure.max_depth < 3 and len(unsure.children[0]) == 4


def test_guesses_hang_below_what_others_have_proposed_too():
    candidates = Candidates()
    candidates.graft([1, 77], [0.8, 0.9])  # the first head's second guess, surely, and what no head has guessed
    candidates.graft([88], [0.4])
    opened([[0.5, 0.1], [0.5, 0.2], [0.5]], candidates=candidates, price=0.2)
    found = dict(zip(paths(candidates), candidates.values[1:], strict=True))
    assert found == pytest.approx(
        {
            (1,): 0.8,
            (1, 77): 0.72,
            (88,): 0.4,
            (0,): 0.5,
            (1, 10): 0.4,
            (1, 77, 20): 0.36,
            (0, 10): 0.25,
            (1, 10, 20): 0.2,
            (88, 10): 0.2,
        }
    )


@given(TABLE, st.lists(st.tuples(st.integers(0, 2), st.floats(0.05, 1.0)), max_size=3))
def test_a_node_is_opened_once_whoever_proposed_it_first(table, chain):
    candidates = Candidates()
    candidates.graft([10 * depth + rank for depth, (rank, _) in enumerate(chain)], [chance for _, chance in chain])
    size = len(set(every_path(table)) | set(itertools.accumulate((rank,) for rank, _ in chain)))
    below = opened(table, candidates=candidates, limit=10_000)
    assert len(set(paths(below))) == len(below.values) - 1 >= size
    for node in range(1, len(below.values)):
        assert below.values[node] <= below.values[below.parents[node]]


def test_no_guesses_and_chances_of_nothing_give_no_nodes():
    assert len(opened([]).values) == 1
    assert len(opened([[0.5], []]).values) == 2
    assert len(opened([[float("nan")] * 2]).values) == 1  # of a target whose states are none
    assert opened([[0.0, 0.0]]).best(prices()).tokens == []
