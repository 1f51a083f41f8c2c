"""The script for a machine with a GPU is in order: it runs from end to end on a CPU, at the smallest of everything."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu_check.py"
TINY = ["--device", "cpu", "--tiny"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def last_line(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_every_part_runs_and_is_reported(script, capsys):
    assert script.main(TINY) == 0
    found = last_line(capsys)
    assert (found["failed"], found["skipped"], found["inexact"]) == ({}, [], [])
    assert all(all(v for k, v in row.items() if k != "graph_reason") for row in found["exactness, float64"].values())
    assert set(found["tiny, passes"]) == {"prefix 24, masked", "prefix 600, masked"}
    assert set(found["tiny, passes"]["prefix 24, masked"]["ratio"]) == {"1", "2", "8"}
    assert found["tiny, the step"]["24"]["eager_ms"] > 0 and found["tiny, the step"]["24"]["graph_reason"] == "on cpu"
    assert found["tiny, decoding"]["oracle, graph"]["tau"] > 1
    assert set(found["attention alone"]["64"]) == {"ordinary, one kernel", "ordinary, two", "fixed shape, masked"}
    for arm, counts in found["tiny, exactness, bfloat16"].items():
        assert counts["equal"] + counts["excused"] == 2, arm


def test_what_the_budget_leaves_no_time_for_is_named(script, capsys):
    assert script.main([*TINY, "--budget", "0"]) == 0
    assert last_line(capsys)["skipped"] == ["exactness, float64", "tiny", "attention alone"]


def test_a_part_that_fails_is_named_and_stops_no_other(script, capsys, monkeypatch):
    def fail(*args):
        raise RuntimeError("no such kernel\nand so on")

    monkeypatch.setattr(script, "step_times", fail)
    assert script.main(TINY) == 0
    found = last_line(capsys)
    assert found["failed"] == {"tiny, the step": "RuntimeError: no such kernel"}
    assert "tiny, decoding" in found and "attention alone" in found


@pytest.mark.parametrize("how", ["wrong", "failing"])
def test_outputs_that_are_not_the_target_s_are_a_failure(script, capsys, monkeypatch, how):
    def accept(self, tokens, choices):
        if how == "failing":
            raise RuntimeError("no such kernel")
        return self.depths.argmax(dim=0, keepdim=True)  # whatever was drafted

    monkeypatch.setattr("medusa_spec.static_tree.StaticTree.accept", accept)
    assert script.main(TINY) == 1
    found = last_line(capsys)
    assert any(name.startswith("exactness, float64, ") for name in found["inexact"])
    assert "tiny, passes" in found and "attention alone" in found


def test_the_largest_shape_that_memory_holds_is_measured_beside_the_smallest(script, monkeypatch):
    cuda = script.torch.device("cuda", 0)
    for free, expected in ((100, ["1B", "8B"]), (20, ["1B", "3B"]), (9, ["1B"]), (2, ["tiny"])):
        monkeypatch.setattr(script.torch.cuda, "mem_get_info", lambda device, free=free: (free * 2**30, 0))
        assert script._fitting(cuda) == expected
