"""A few hundredths of the differential fuzz run: the same cases every time; more of them are for a quiet hour."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_spec.noise import SharedNoise
from medusa_spec.tree import TreeShape

SCRIPT = Path(__file__).parent.parent / "scripts" / "fuzz.py"
CASES = 48


@pytest.fixture(scope="module")
def fuzz() -> Any:
    spec = importlib.util.spec_from_file_location("fuzz", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("first", range(0, CASES, 8))
def test_nothing_differs_from_plain_decoding(fuzz, first):
    for number in range(first, first + 8):
        outcome = fuzz.run(fuzz.case_of(number))
        assert outcome.difference is None, f"case {number}: {outcome.difference}"


def test_cases_of_every_kind_are_among_them(fuzz):
    cases = [fuzz.case_of(number) for number in range(CASES)]
    assert {len(case.lengths) for case in cases} >= {1, 2, 3}
    assert {case.seed is None for case in cases} == {case.prepare for case in cases} == {True, False}
    assert {case.drafter for case in cases} == {"knowing", "heads", "ngram", "suffix", "hybrid"}
    assert len({case.architecture for case in cases}) >= 12
    assert any(case.stop_string for case in cases) and any(case.ends for case in cases)


def sampled_batch(fuzz):
    kind = {"architecture": "llama", "overrides": {}, "lengths": (5, 9, 14), "new_tokens": 24, "seed": 3}
    rest = {"settings": {}, "ends": 0, "stop_string": False, "drafter": "knowing", "right": 0.7, "options": {}}
    return fuzz.Case(number=0, **kind, **rest)


@pytest.mark.parametrize("fault", ["mask", "noise"])
def test_a_fault_is_found(fuzz, fault, monkeypatch):
    case = sampled_batch(fuzz)
    assert fuzz.run(case).difference is None and fuzz.run(case).accepted > 0
    if fault == "mask":  # every node sees all nodes before it
        whole = property(lambda shape: torch.ones(shape.size, shape.size).tril().bool(), lambda shape, value: None)
        monkeypatch.setattr(TreeShape, "mask", whole, raising=False)
    else:  # every row draws by itself
        monkeypatch.setattr(SharedNoise, "_at", lambda shared, position, like: shared._draw(like))
    assert "ids" in str(fuzz.run(case).difference)
