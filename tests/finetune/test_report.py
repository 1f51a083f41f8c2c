"""The report stage."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from medusa_spec.checkpoint import read_config
from medusa_spec.errors import DataError
from medusa_spec.finetune import run_pipeline
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.report import run_report
from medusa_spec.finetune.target import Target
from medusa_spec.testing import tiny_tokenizer

MakeConfig = Callable[..., FinetuneConfig]


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
    assert training["measured"]["accepted_marginal"] == figures["measured"]["accepted_marginal"]
    assert [shares[0] for shares in figures["ranks"]] == pytest.approx(figures["calibration"]["top1"])
    assert f"μ {training['measured']['mu']:.3f}" in (folder / "README.md").read_text()


def short_model(folder: Path) -> Path:
    """A model that has learnt 90 positions."""
    tokenizer = tiny_tokenizer()
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": len(tokenizer), "n_positions": 90}
    GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=tokenizer.eos_token_id)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_prompts_that_learnt_positions_cannot_hold_are_left_out(make_config: MakeConfig, tmp_path: Path) -> None:
    short_model(tmp_path / "model")
    words = ["short", "a question that is much longer than the others are, so that no answer fits behind it"]
    records = [{"prompt": f"{number} {words[number % 2]}", "completion": "an answer"} for number in range(40)]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = make_config(
        tmp_path / "run", model=str(tmp_path / "model"), data=str(data), held_out=0.5, max_length=90, report_prompts=8
    )
    run_pipeline(config)
    figures = json.loads((tmp_path / "run" / "report" / "report.json").read_text())
    assert 0 < figures["measured"]["prompts"] < 8


def test_of_texts_the_first_halves_are_gone_on_with(make_config: MakeConfig, tmp_path: Path) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text(
        "".join(json.dumps({"text": f"{number} red cat sees one tree " * 3}) + "\n" for number in range(40))
    )
    config = make_config(tmp_path / "run", data=str(data), epochs=1)
    run_pipeline(config)
    figures = json.loads((tmp_path / "run" / "report" / "report.json").read_text())
    assert figures["measured"]["prompts"] == 4 and figures["measured"]["equal"]["tree/hf"]["equal"] == 4


def test_no_prompt_that_leaves_room_is_said(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(
        tmp_path / "run", model=str(short_model(tmp_path / "model")), max_length=90, report_new_tokens=89
    )
    with pytest.raises(DataError, match="room for report_new_tokens = 89 within the 90 positions"):
        run_pipeline(config)
