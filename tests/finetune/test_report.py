"""The report stage."""

import json
from pathlib import Path

from medusa_spec.checkpoint import read_config
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.report import loops, run_report
from medusa_spec.finetune.target import Target


def test_the_report_holds_what_the_decoder_did(finished: FinetuneConfig) -> None:
    folder = Path(finished.output) / "report"
    figures = json.loads((folder / "report.json").read_text())
    measured = figures["measured"]
    assert measured["prompts"] == 4 and measured["equal"]["tree/hf"]["equal"] == 4
    assert set(measured["tokens_per_second"]) == {"hf", "plain", "tree"}
    assert figures["loops"]["of"] == 4
    text = (folder / "report.md").read_text()
    assert "held-out prompts" in text and "draft nodes" in text
    assert run_report(finished, Target(finished)) == figures


def test_the_heads_know_what_was_measured(finished: FinetuneConfig) -> None:
    folder = Path(finished.output) / "heads"
    training = read_config(folder).training
    figures = json.loads((Path(finished.output) / "report" / "report.json").read_text())
    assert training["measured"]["mu"] == figures["measured"]["mu"]
    assert "without_loops" in training["measured"]
    assert f"μ {training['measured']['mu']:.3f}" in (folder / "README.md").read_text()


def test_loops_are_seen_and_prose_is_not() -> None:
    assert loops(list(range(50)) + [1, 2, 3] * 30)
    assert not loops(list(range(200)))
    assert not loops([1, 2, 3])
    assert not loops([1, 2, 3] * 30 + list(range(64)))
