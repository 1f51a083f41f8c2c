from collections import Counter
from dataclasses import replace

from medusa_spec.comparison import Comparison, PromptRecord
from medusa_spec.comparison_table import columns, comparison_table
from medusa_spec.figures import Run
from medusa_spec.stats import DecodingStats

STATS = DecodingStats(
    new_tokens=10, requests=1, passes=5, drafted_passes=5, accepted=4, accepted_by_depth=[4],
    offered_by_depth=[5], pass_sizes=Counter({8: 5}),
)  # fmt: skip
RECORD = PromptRecord(
    category="chat",
    name="1",
    runs={"hf": Run((1, 2), 3.0), "plain": Run((1, 2), 2.0), "tree": Run((1, 3), 1.0)},
    tree_stats=STATS,
    plain_stats=STATS,
)
MACHINE = {
    "device": "cpu", "dtype": "float64", "threads": 2, "revision": None,
    "versions": {"torch": "9.9"},
}  # fmt: skip
COMPARISON = Comparison(records=(RECORD,), machine=MACHINE, others=0.0)


def test_speed_ups_stand_beside_mu_and_equality() -> None:
    table = comparison_table(COMPARISON)
    assert "mu 0.80" in table and "tau 1.80" in table
    line = next(line for line in table.splitlines() if line.startswith("tree / Hugging Face"))
    assert line.split()[4:] == ["3.00x", "-", "0", "of", "1", "1"]
    assert "honest" in table and "rule of thumb" in table and "quiet" in table


def test_rounding_is_explained_in_16_bit_arithmetic_only() -> None:
    assert "rounds" not in comparison_table(COMPARISON)
    half = replace(COMPARISON, machine=MACHINE | {"dtype": "bfloat16"})
    assert "rounds" in comparison_table(half)


def test_categories_have_a_row_each_if_there_are_several() -> None:
    assert "category" not in comparison_table(COMPARISON)
    several = replace(COMPARISON, records=(RECORD, replace(RECORD, category="maths")))
    lines = comparison_table(several).splitlines()
    assert {line.split()[0] for line in lines if "0/1" in line} == {"chat", "maths"}


def test_a_noisy_machine_is_said() -> None:
    assert "NOT QUIET" in comparison_table(replace(COMPARISON, others=1.0))


def test_columns_line_up() -> None:
    assert columns([["a", "bb"], ["ccc", "d"]]) == "a    bb\nccc   d"


def test_interval_is_given_from_two_prompts_on() -> None:
    assert "[3.00, 3.00]" not in comparison_table(COMPARISON)
    assert "[3.00, 3.00]" in comparison_table(replace(COMPARISON, records=(RECORD, RECORD)))
