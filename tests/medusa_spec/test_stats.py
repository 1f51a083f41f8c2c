import pytest

from medusa_spec.stats import PHASES, DecodingStats
from medusa_spec.tree import chain, shape_of

BUSH = shape_of((-1, 0, 1, 0, 3))
"""0 ─ 1 ─ 2 and 0 ─ 3 ─ 4."""


def recorded() -> DecodingStats:
    """Three drafted passes and a plain one after a prefill."""
    stats = DecodingStats(requests=1, spans=[1])
    stats.record_pass(BUSH, (0, 1, 2), 3)  # all of a path
    stats.record_pass(BUSH, (0, 3), 2)  # its first node; a child was offered below it
    stats.record_pass(BUSH, (0,), 1)  # nothing
    stats.record_pass(chain(0), (0,), 1)  # nothing drafted
    stats.new_tokens = 1 + 3 + 2 + 1 + 1
    return stats


def test_mu_is_accepted_tokens_per_drafted_pass() -> None:
    stats = recorded()
    assert (stats.accepted, stats.drafted_passes) == (2 + 1 + 0, 3)
    assert stats.mu == 1.0


def test_tau_is_tokens_per_pass_over_all_passes_and_not_the_prefill() -> None:
    stats = recorded()
    assert stats.passes == 4
    assert stats.tau == (3 + 2 + 1 + 1) / 4


def test_depths_are_offered_below_accepted_nodes_alone() -> None:
    stats = recorded()
    assert stats.accepted_by_depth == [2, 1]
    assert stats.offered_by_depth == [3, 2]


def test_mu_counts_what_was_accepted_before_a_cut_and_spans_what_came_out() -> None:
    stats = DecodingStats(requests=1, spans=[1])
    stats.record_pass(BUSH, (0, 1, 2), 1)
    assert stats.accepted == 2 and stats.spans == [1, 1]


def test_pass_sizes_count_the_root() -> None:
    assert recorded().pass_sizes == {5: 3, 1: 1}


def test_nothing_decoded_is_zero_everywhere() -> None:
    stats = DecodingStats()
    assert (stats.mu, stats.tau, set(stats.share.values())) == (0.0, 0.0, {0.0})


def test_shares_are_of_the_time_after_the_prefill() -> None:
    stats = DecodingStats()
    stats.seconds.update(prefill=100.0, verify=3.0, draft=1.0)
    assert set(stats.share) == set(PHASES)
    assert sum(stats.share.values()) == pytest.approx(1.0)
    assert stats.share["verify"] == pytest.approx(0.75)


def test_merging_is_counting_on() -> None:
    other = DecodingStats(requests=1, spans=[1], new_tokens=5)
    other.record_pass(chain(3), (0, 1, 2, 3), 4)
    other.seconds["verify"] = 2.0
    one = recorded()
    one.seconds["verify"] = 1.0
    merged = one.merge(other)
    assert (merged.requests, merged.passes, merged.new_tokens) == (2, 5, 13)
    assert (merged.accepted, merged.drafted_passes) == (6, 4)
    assert merged.accepted_by_depth == [3, 2, 1]
    assert merged.offered_by_depth == [4, 3, 1]
    assert merged.spans == one.spans + other.spans
    assert merged.pass_sizes == {5: 3, 1: 1, 4: 1}
    assert merged.seconds["verify"] == 3.0
    assert merged.tau == (13 - 2) / 5


def test_merging_leaves_both_alone() -> None:
    one, other = recorded(), recorded()
    one.merge(other).record_pass(BUSH, (0, 1), 2)
    assert one == other == recorded()
