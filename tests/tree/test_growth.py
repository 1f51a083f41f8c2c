"""Trees grow as far as they pay, and what is left of them is the best there was."""

import itertools
import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from medusa_spec.tree import Growing, Growth

FREE = {"token_seconds": 1.0, "level_seconds": 0.0, "pass_seconds": ((1, 1.0), (64, 1.0))}


def growth(**changes):
    return Growth(**{**FREE, "beam": 8, "width": 8, **changes})


CHANCES = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3)
SECONDS = st.lists(st.floats(0.1, 5.0), min_size=3, max_size=3)


@st.composite
def grown(draw, largest=8, **changes):
    """A tree of a few levels, grown by whatever the rules ask for, with the rules."""
    times = sorted(draw(SECONDS)) if draw(st.booleans()) else draw(SECONDS)
    rules = growth(
        pass_seconds=tuple(zip((1, 3, largest + 1), times, strict=True)),
        token_seconds=draw(st.floats(0.1, 20.0)),
        level_seconds=draw(st.sampled_from([0.0, 0.1, 1.0])),
        hit=draw(st.floats(0.1, 1.0)),
        beam=draw(st.integers(1, 3)),
        **changes,
    )
    growing, nodes = Growing(rules, draw(st.sampled_from([None, 0, 1, 2, 5]))), [0]
    for _ in range(draw(st.integers(1, 3))):
        guesses = [(node, chance) for node in nodes for chance in _shares(draw(CHANCES))]
        nodes = growing.add([node for node, _ in guesses], range(len(guesses)), [chance for _, chance in guesses])
        if not nodes:
            break
    return rules, growing


def _shares(chances):
    """Chances of siblings: together one at most, the first the likeliest."""
    total = max(1.0, sum(chances))
    return sorted((chance / total for chance in chances), reverse=True)


def net(rules, values):
    """What nodes of these values gain beyond what a pass over them costs, in tokens."""
    return sum(values) - (rules.seconds(len(values) + 1) - rules.seconds(1)) / rules.token_seconds


def finished(growing):
    chosen = growing.finish()
    return chosen.shape, chosen.tokens


def closed(growing, nodes):
    return all(growing.candidates.parents[node] in (0, *nodes) for node in nodes)


def values_of(growing, shape, tokens):
    """Values of a finished tree's nodes, by following each to the node that it was."""
    where = {0: 0}
    for node in range(1, shape.size):
        parent = where[shape.parents[node]]
        (where[node],) = [
            n
            for n, p in enumerate(growing.candidates.parents)
            if p == parent and growing.candidates.tokens[n] == tokens[node - 1]
        ]
    return {node: growing.candidates.values[old] for node, old in where.items()}, [
        where[n] for n in range(1, shape.size)
    ]


@given(grown())
def test_values_fall_along_a_path(made):
    _, growing = made
    for node in range(1, len(growing.candidates.values)):
        assert growing.candidates.values[node] <= growing.candidates.values[growing.candidates.parents[node]]


@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=6))
def test_a_value_is_the_chance_that_all_guesses_up_to_it_are_right(chances):
    growing, node, expected = Growing(growth()), 0, 1.0
    for chance in chances:
        growing.add([node], [7], [chance])
        node, expected = len(growing.candidates.values) - 1, expected * chance
        assert growing.candidates.values[node] == pytest.approx(expected)


@given(grown(largest=7))
def test_what_is_left_is_the_best_of_all_trees_that_could_be_left(made):
    """Brute force: every set of nodes that holds its nodes' parents, up to the limit."""
    rules, growing = made
    shape, tokens = finished(growing)
    _, kept = values_of(growing, shape, tokens)
    nodes = range(1, len(growing.candidates.values))
    assume(len(nodes) <= 12)
    best = 0.0
    for count in range(min(growing.limit, len(nodes)) + 1):
        for chosen in itertools.combinations(nodes, count):
            if closed(growing, chosen):
                best = max(best, net(rules, [growing.candidates.values[node] for node in chosen]))
    assert net(rules, [growing.candidates.values[node] for node in kept]) == pytest.approx(best)


@given(grown())
def test_a_finished_tree_holds_its_nodes_parents_and_keeps_its_limit(made):
    _, growing = made
    shape, tokens = finished(growing)
    _, kept = values_of(growing, shape, tokens)
    assert closed(growing, kept) and len(set(kept)) == len(kept)
    assert len(tokens) == shape.size - 1 <= growing.limit


@given(grown())
def test_the_likeliest_chain_lies_first(made):
    _, growing = made
    shape, tokens = finished(growing)
    values, _ = values_of(growing, shape, tokens)
    for node in range(shape.size):
        likeliest_first = sorted(shape.children[node], key=lambda child: (-values[child], child))
        assert list(shape.children[node]) == likeliest_first
        if likeliest_first:
            assert likeliest_first[0] == node + 1  # right behind its parent


def test_a_limit_and_the_largest_measured_pass_bound_the_tree():
    for limit, expected in ((None, 5), (3, 3), (0, 0), (50, 5)):
        growing = Growing(growth(pass_seconds=((1, 1.0), (6, 1.0))), limit)
        growing.add([0] * 8, range(8), [0.1] * 8)
        shape, tokens = finished(growing)
        assert shape.size - 1 == len(tokens) == expected


def test_dearer_nodes_give_smaller_trees():
    sizes = []
    for price in (0.0, 0.02, 0.05, 0.2, 0.7):
        growing = Growing(growth(pass_seconds=((1, 1.0), (11, 1.0 + 10 * price))))
        nodes = growing.add([0] * 4, range(4), [0.5, 0.2, 0.1, 0.04])
        for node in nodes:
            growing.add([node] * 2, range(2), [0.4, 0.1])
        sizes.append(growing.finish().shape.size)
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 5 and sizes[-1] == 1


def test_dearer_levels_give_shallower_trees():
    depths = []
    for price in (0.0, 0.2, 0.5, 2.0):
        growing, nodes, depth = Growing(growth(level_seconds=price, hit=0.8)), [0], 0
        while nodes and depth < 6:
            nodes = growing.add([nodes[0]], [depth], [0.7])
            depth += 1
        depths.append(depth)
    assert depths == sorted(depths, reverse=True) and len(set(depths)) == 4 and (depths[0], depths[-1]) == (6, 1)


def test_a_level_is_asked_for_exactly_where_its_expected_gain_exceeds_its_time():
    for hit, asked in ((0.49, False), (0.51, True)):
        growing = Growing(growth(hit=hit, level_seconds=0.6, token_seconds=2.0))
        assert bool(growing.add([0, 0], [1, 2], [0.4, 0.2])) == asked  # (.4 + .2) * hit tokens against .6 / 2


def test_a_level_must_be_worth_the_places_of_its_nodes_too():
    for price, asked in ((0.03, True), (0.05, False)):  # .4 * .5 tokens less a place against .16
        rules = growth(hit=0.5, level_seconds=0.16, pass_seconds=((1, 1.0), (11, 1.0 + 10 * price)))
        assert bool(Growing(rules).add([0], [1], [0.4])) == asked


def test_the_rate_of_hits_may_be_that_of_the_text():
    for hit, asked in ((0.49, False), (0.51, True)):
        growing = Growing(growth(hit=1.0, level_seconds=0.6, token_seconds=2.0), hit=hit)
        assert bool(growing.add([0, 0], [1, 2], [0.4, 0.2])) == asked


def test_the_likeliest_nodes_of_a_level_get_children_and_no_more_than_the_beam():
    growing = Growing(growth(beam=2))
    assert growing.add([0] * 4, [5, 6, 7, 8], [0.1, 0.3, 0.2, 0.25]) == [2, 4]
    assert [growing.candidates.tokens[node] for node in (2, 4)] == [6, 8]


def test_guesses_below_the_price_of_a_node_are_left_out():
    growing = Growing(growth(pass_seconds=((1, 1.0), (11, 2.0))))
    assert growing.growth.node_price == pytest.approx(0.1)
    growing.add([0, 0, 0], [5, 6, 7], [0.3, 0.11, 0.09])
    assert growing.candidates.tokens == [-1, 5, 6]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": -1.0}, "temperature must be above 0, got -1.0"),
        ({"hit": 0.0}, "hit must be in 0..1 and above 0, got 0.0"),
        ({"coverage": 1.1}, "coverage must be in 0..1"),
        ({"beam": 0}, "beam must be an integer of 1 or more, got 0"),
        ({"width": 2.0}, "width must be an integer of 1 or more, got 2.0"),
        ({"width": True}, "width must be an integer"),
    ],
)
def test_rules_that_cannot_be_are_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        growth(**changes)


def test_rules_survive_json():
    rules = growth(pass_seconds=((1, 1), (4, 1.5), (9, 2.25)), hit=0.75, temperature=1.2, coverage=0.97, width=3)
    assert Growth(**json.loads(json.dumps(rules.to_dict()))) == rules
    assert hash(rules) == hash(Growth(**rules.to_dict()))
