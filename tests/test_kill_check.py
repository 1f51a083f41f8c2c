"""The check of kills at random moments runs and finds what it looks for; ten rounds of it are for a quiet hour."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "kill_check.py"


def script() -> Any:
    spec = importlib.util.spec_from_file_location("kill_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_run_killed_once_in_every_stage_ends_with_the_same_weights() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds", "1", "--runs", "joint"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "joint, round 0: equal;" in done.stdout
    assert done.stdout.endswith("0 of 1 rounds ended with other weights or files left behind\n")
    line = next(line for line in done.stdout.splitlines() if "round 0" in line)
    assert all(f"{stage} " in line for stage in ("data", "states", "train", "joint", "calibrate", "report"))


def test_every_stage_belongs_to_one_of_the_runs(tmp_path: Path) -> None:
    """A stage that is added later must be killed, too."""
    module = script()
    configs = [module.settings(tmp_path, name, "run") for name in module.RUNS]
    assert any(config.data == ("self",) for config in configs) and any(config.distil for config in configs)
    assert any(config.kept_logits for config in configs)  # the teacher stage
    assert any(config.joint for config in configs)
    assert set(module.STAGES) == set("self distil data states teacher train joint calibrate report".split())


def test_other_weights_and_files_left_behind_are_told_apart(tmp_path: Path) -> None:
    module = script()
    config = module.settings(tmp_path, "joint", "run")
    heads, left = Path(config.output) / "heads", Path(config.output) / "heads" / ".heads.safetensors.x.unfinished"
    for folder in (heads, Path(config.output) / "train", left):
        folder.mkdir(parents=True)
        (folder / "heads.safetensors").write_bytes(b"weights")
    expected = module.digest(config)
    assert module.verdict(config, expected).startswith("LEFT BEHIND heads/.heads.safetensors.x.unfinished")
    (left / "heads.safetensors").unlink()
    left.rmdir()
    assert module.verdict(config, expected) == "equal"
    (heads / "heads.safetensors").write_bytes(b"others")
    assert module.verdict(config, expected) == "DIFFERENT"
