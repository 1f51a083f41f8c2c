"""The tables show what the plan holds."""

from dataclasses import replace

from medusa_spec.advice import Advice
from medusa_spec.cli.plan import Plan
from medusa_spec.cli.plan_table import plan_table
from medusa_spec.economics import Costs, best_of, by_depth, by_size
from medusa_spec.footprint import Footprint

COSTS = Costs(passes={1: 0.01, 4: 0.012}, drafts={1: 0.001, 2: 0.002}, rest=0.001)
EXPECTED = {1: [0.0, 0.5, 0.7], 2: [0.0, 0.5, 0.9]}
SIZES = by_size(COSTS, EXPECTED, [1, 2])
PLAN = Plan(
    labels={"model": "m"},
    prefix=256,
    costs=COSTS,
    sizes=SIZES,
    depths=by_depth(COSTS, EXPECTED, [1, 2]),
    best=best_of(SIZES),
    rows=1,
    batch=None,
    memory=Footprint(heads=3 << 20, per_token=2048, heads_per_token=0, context=1000, cache=2048000, free=1 << 30),
    advice=[Advice(name="kernels", holds=True, text="dear"), Advice(name="gain", holds=None, text="open")],
    measured=None,
    machine={},
    others=0.0,
)


def test_times_trees_heads_memory_and_advice_are_shown():
    lines = plan_table(PLAN).splitlines()
    assert any(line.split() == ["T(N),", "ms", "10.00", "12.00"] for line in lines)
    (best,) = [line for line in lines if "<- best" in line]
    assert best.split()[:4] == ["2", "2", "0.90", "0.43"] and "1.33x" in best
    assert "heads worth using: 2 of 2" in lines
    assert "heads 3.0 MiB; cache 2.0 KiB a token" in lines
    assert "free memory: 1024.0 MiB: it fits" in lines
    assert lines[-4:-2] == ["NO  kernels: dear.", "if  gain: open."]


def test_what_does_not_fit_is_said_aloud_and_what_is_unknown_is_said():
    small = replace(PLAN, memory=replace(PLAN.memory, free=10, heads_per_token=1024))
    assert "DOES NOT FIT" in plan_table(small) and "1.0 KiB in the heads" in plan_table(small)
    assert "unknown on this system" in plan_table(replace(PLAN, memory=replace(PLAN.memory, free=None)))


def test_passes_of_several_rows_have_lines_of_their_own():
    text = plan_table(replace(PLAN, rows=8, batch={1: 0.02, 4: 0.05}))
    assert "T(N) of 8 rows, ms" in text and "2.50" in text


def test_without_counts_there_is_no_best_tree():
    text = plan_table(replace(PLAN, best=None, depths=[], sizes=by_size(COSTS, None, [1, 2])))
    assert "<- best" not in text and "heads worth using" not in text and "not counted" in text
