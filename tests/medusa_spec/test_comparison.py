import json
from collections import Counter

import pytest

from medusa_spec.comparison import Comparison, PromptRecord
from medusa_spec.figures import Run
from medusa_spec.stats import DecodingStats


def _stats(accepted: int, passes: int, nodes: int, verify: float) -> DecodingStats:
    stats = DecodingStats(
        new_tokens=accepted + passes + 1,
        requests=1,
        passes=passes,
        drafted_passes=passes if nodes > 1 else 0,
        accepted=accepted,
        accepted_by_depth=[accepted] if accepted else [],
        offered_by_depth=[passes] if nodes > 1 else [],
        pass_sizes=Counter({nodes: passes}),
    )
    stats.seconds["verify"] = verify
    return stats


def _record(category: str, accepted: int, *, seconds: float = 1.0, differs: bool = False) -> PromptRecord:
    tokens = tuple(range(10))
    other = (*tokens[:4], 99, *tokens[5:]) if differs else tokens
    return PromptRecord(
        category=category,
        name="n",
        runs={"plain": Run(tokens, 2.0), "tree": Run(other, seconds)},
        tree_stats=_stats(accepted, 5, 4, 6.0),
        plain_stats=_stats(0, 9, 1, 9.0),
    )


COMPARISON = Comparison(
    records=(_record("a", 4), _record("b", 2, seconds=4.0, differs=True)),
    settings={"model": "m"},
    others=0.0,
)


def test_figures_of_all_prompts_are_sums() -> None:
    assert COMPARISON.stats().mu == pytest.approx(6 / 10)
    assert COMPARISON.tokens_per_second("tree") == pytest.approx(20 / 5)
    assert COMPARISON.speedup("tree", "plain").value == pytest.approx(4 / 5)
    assert COMPARISON.equality("tree", "plain") == (1, 2, (4,))


def test_a_category_is_its_own_prompts_alone() -> None:
    part = COMPARISON.only("b")
    assert part.stats().mu == pytest.approx(2 / 5)
    assert part.speedup("tree", "plain").value == pytest.approx(1 / 2)
    assert part.categories == ("b",)


def test_honest_forecast_comes_from_measured_pass_times() -> None:
    # T(1) = 9 s / 9 passes; T(N) = 6 s / 5 passes; tau = (4 + 5) / 5 and (2 + 5) / 5: 16 / 10.
    economics = COMPARISON.economics()
    assert economics.plain_pass == pytest.approx(1.0)
    assert economics.tree_pass == pytest.approx(1.2)
    assert economics.honest == pytest.approx(1.6 * 1.0 / 1.2)


def test_json_is_one_line_and_holds_every_figure() -> None:
    text = COMPARISON.to_json()
    assert "\n" not in text
    found = json.loads(text)
    assert found["speedup"]["tree/plain"]["value"] == pytest.approx(0.8)
    assert found["equal"]["tree/plain"] == {"equal": 1, "of": 2, "first_differences": [4]}
    assert found["mu"] == pytest.approx(0.6)
    assert set(found["by_category"]) == {"a", "b"}
    assert found["busy_cores_elsewhere"] == 0.0
    assert found["economics"]["honest"] == pytest.approx(1.6 / 1.2)


def test_merging_leaves_the_records_as_they_were() -> None:
    before = COMPARISON.to_dict()
    COMPARISON.stats()
    assert COMPARISON.to_dict() == before
