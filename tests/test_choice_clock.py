"""The clock of `benchmarks/trees.py` sees every choice of a tree once, and takes itself away again."""

import sys
import time
from pathlib import Path

import torch

from medusa_spec.drafters.choice import GrowthChoice
from medusa_spec.tree import Candidates, Growth

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from choice_clock import CHOOSING, ChoiceClock  # noqa: E402

RULES = Growth(token_seconds=1.0, level_seconds=0.0, pass_seconds=((1, 1.0), (9, 1.1)))


def test_calls_within_calls_are_counted_once(monkeypatch):
    best = Candidates.best
    monkeypatch.setattr(Candidates, "best", lambda *arguments: time.sleep(0.05) or best(*arguments))
    choice = GrowthChoice(RULES, deepest=1, limit=None, draft_ids=None)
    choice.take(0, torch.tensor([[0.6, 0.3, 0.1]]).log())
    with ChoiceClock().watching() as clock:
        began = time.perf_counter()
        choice.tree(7)  # calls best
        passed = time.perf_counter() - began
    assert 0.05 <= clock.lap() <= passed and clock.lap() == 0.0


def test_afterwards_all_is_as_before():
    before = [owner.__dict__.get(name) for owner, name in CHOOSING]
    with ChoiceClock().watching():
        assert [owner.__dict__.get(name) for owner, name in CHOOSING] != before
    assert [owner.__dict__.get(name) for owner, name in CHOOSING] == before
