"""How much data buys how much μ."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_spec.checkpoint import load_heads
from medusa_spec.errors import ConfigError
from medusa_spec.finetune import curve
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.curve import epochs_for, halvings, measure_point, run_settings
from medusa_spec.finetune.stages import read_done
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.tokens import TokenData

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "data_curve.py"


def script() -> Any:
    spec = importlib.util.spec_from_file_location("data_curve", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("steps", "expected"), [(1000, 6), (100, 6), (99, 7), (50, 12), (10, 24), (1, 24)])
def test_few_data_are_passed_over_more_often_up_to_a_bound(steps: int, expected: int) -> None:
    assert epochs_for(steps, epochs=6, least_steps=600, most_epochs=24) == expected


def test_more_epochs_that_were_asked_for_are_kept() -> None:
    assert epochs_for(10, epochs=30, least_steps=600, most_epochs=24) == 30


def test_all_of_the_data_give_the_figures_of_the_run_itself(finished: FinetuneConfig, tmp_path: Path) -> None:
    point = measure_point(finished, Target(finished), halvings(Path(finished.output), 1)[0], tmp_path)
    calibration = read_done(Path(finished.output), "calibrate")["result"]
    assert point["expected_mu"] == calibration["expected_mu"]
    assert point["top1"] == calibration["top1"] and point["steps"] == 34
    assert point["tokens"] == sum(TokenData(Path(finished.output) / "data", "train").lengths())
    ours = load_heads(tmp_path / "heads", Target(finished).backbone)[0].state_dict()
    theirs = load_heads(Path(finished.output) / "heads", Target(finished).backbone)[0].state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_finished_point_is_read_and_one_with_other_settings_is_refused(
    finished: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, target = replace(finished, epochs=1), Target(finished)
    point = measure_point(config, target, 200, tmp_path)
    monkeypatch.setattr(curve, "train_heads", None)
    assert measure_point(config, target, 200, tmp_path) == point
    with pytest.raises(ConfigError, match="learning_rate was 0.001, is 0.1"):
        measure_point(replace(config, learning_rate=0.1), target, 200, tmp_path)


def test_states_that_the_family_cannot_read_are_refused(finished: FinetuneConfig, tmp_path: Path) -> None:
    config = replace(finished, kind="eagle", draft_vocab_size=None, options={})
    with pytest.raises(ConfigError, match="the run must hold the states that kind 'eagle' reads"):
        measure_point(config, Target(finished), 200, tmp_path)


def test_the_script_measures_nested_sizes_and_takes_them_up_again(
    finished: FinetuneConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = json.dumps({"draft_vocab_size": 64, "max_tree_size": 15, "device": "cpu", "batch_positions": 512})
    arguments = [finished.output, "--output", str(tmp_path / "curve"), "--sizes", "300", "1k", "--num-heads", "2"]
    arguments += ["--epochs", "1", "--least-steps", "4", "--most-epochs", "3", "--settings", settings]
    script().main(arguments)
    first = (tmp_path / "curve" / "curve.json").read_text()
    record = json.loads(first)
    assert [point["answer_tokens"] >= size for point, size in zip(record["points"], (300, 1000), strict=True)]
    assert [point["epochs"] for point in record["points"]] == [3, 2]
    assert all(point["tokens"] > point["answer_tokens"] for point in record["points"])
    assert len(record["points"][0]["top1"]) == 2 and "μ(15)" in capsys.readouterr().out
    assert (tmp_path / "curve" / "curve.png").read_bytes().startswith(b"\x89PNG")
    script().main(arguments)
    assert json.loads((tmp_path / "curve" / "curve.json").read_text())["points"] == record["points"]


def test_the_settings_of_a_run_are_those_it_was_made_with(finished: FinetuneConfig) -> None:
    found = run_settings(Path(finished.output))
    assert found == {"model": finished.model, "revision": None, "dtype": "float32", "output": finished.output}
