import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import typer.main

from medusa_spec.checkpoint import heads_folder, read_config
from medusa_spec.cli import main
from medusa_spec.cli.app import app
from medusa_spec.finetune import FinetuneConfig, mask_preview, pipeline
from medusa_spec.finetune.choices import LOSSES
from medusa_spec.heads.config import KINDS


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Calls of the pipeline and of the preview, neither of which runs."""
    calls: list[Any] = []

    def run_pipeline(config: Any, **options: Any) -> Path:
        calls.append(("run", config, options))
        return tmp_path

    def preview(config: Any) -> str:
        calls.append(("preview", config))
        return "the preview"

    monkeypatch.setattr(pipeline, "run_pipeline", run_pipeline)
    monkeypatch.setattr(mask_preview, "preview", preview)
    return calls


def _run(*arguments: str) -> object:
    with pytest.raises(SystemExit) as stopped:
        main(["finetune", *arguments])
    return stopped.value.code


def test_options_become_settings_and_the_others_keep_their_defaults(runs: list[Any]) -> None:
    options = "--model m --data a.jsonl --data b.jsonl --output out --epochs 3 --num-heads 2"
    options += " --lm-head low_rank --source self --dtype float32 --learning-rate 0.01 --tree-size 7"
    assert _run(*options.split()) == 0
    ((_, config, how),) = runs
    assert config == FinetuneConfig(
        model="m",
        data=("a.jsonl", "b.jsonl"),
        output="out",
        epochs=3,
        num_heads=2,
        lm_head="low_rank",
        sources=("self",),
        dtype="float32",
        learning_rate=0.01,
        tree_size=7,
    )
    assert how == {"stages": None, "redo": None}


def test_the_targets_own_writing_is_asked_for_by_options(runs: list[Any]) -> None:
    options = "--model m --data a --output o --distil --distil-temperature 0.5 --distil-batch 8 --distil-new-tokens 99"
    assert _run(*options.split(), "--self-opening", "Who ", "--self-opening", "") == 0
    config = runs[0][1]
    assert config.distil and config.distil_temperature == 0.5
    assert (config.distil_batch, config.distil_new_tokens, config.self_openings) == (8, 99, ("Who ", ""))


def test_what_is_read_and_left_out_becomes_settings(runs: list[Any]) -> None:
    options = "--model m --data a --output o --max-records 5 --skip-unusable --drop-loops --drop-duplicates"
    assert _run(*options.split(), "--states-dump", "dump") == 0
    assert _run(*"--model m --data a --output o".split()) == 0
    given, default = (config for _, config, _ in runs)
    assert given.max_records == 5 and given.skip_unusable and given.drop_loops and given.drop_duplicates
    assert given.states_dump == "dump"
    assert default == FinetuneConfig(model="m", data=("a",), output="o")


def test_what_is_watched_and_in_how_many_pieces_become_settings(runs: list[Any]) -> None:
    options = "--model m --data a --output o --gradient-accumulation 4 --batch-positions 512 --eval-prompts 0"
    assert _run(*options.split(), "--report-to", "tensorboard", "--report-to", "wandb") == 0
    config = runs[0][1]
    assert (config.gradient_accumulation, config.batch_positions, config.eval_prompts) == (4, 512, 0)
    assert config.report_to == ("tensorboard", "wandb")


def test_a_family_and_its_options_become_settings(runs: list[Any]) -> None:
    options = "--model m --data a --output o --kind recurrent --option tied=false --option inner_size=16"
    assert _run(*options.split()) == 0
    config = runs[0][1]
    assert config.kind == "recurrent" and config.options == {"tied": False, "inner_size": 16}


def test_how_is_learnt_becomes_settings(runs: list[Any]) -> None:
    options = "--model m --data a --output o --loss lk --top-logits 16 --ema 0.99 --learning-rates lm_head=0.1"
    assert _run(*options.split(), "--learning-rates", "heads.0=2") == 0
    config = runs[0][1]
    assert (config.loss, config.top_logits, config.ema) == ("lk", 16, 0.99)
    assert config.learning_rates == {"lm_head": 0.1, "heads.0": 2.0}


def test_a_zero_is_a_value(runs: list[Any]) -> None:
    options = "--model m --data a --output o --eval-prompts 0 --warmup 0 --self-new-tokens 40 --depth-decay 0.7"
    assert _run(*options.split()) == 0
    config = runs[0][1]
    assert (config.eval_prompts, config.warmup, config.self_new_tokens, config.depth_decay) == (0, 0.0, 40, 0.7)


def test_every_loss_is_named_in_the_help() -> None:
    shown = {option.name: option.help for option in typer.main.get_command(app).commands["finetune"].params}
    assert all(loss in shown["loss"] for loss in LOSSES)


def test_an_option_of_another_family_is_one_message(runs: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(*"--model m --data a --output o --kind hydra --option tied=false".split()) == 2
    error = capsys.readouterr().err
    assert "options of hydra heads must be among [], got 'tied'" in error and not runs


def test_every_family_is_named_in_the_help() -> None:
    shown = {option.name: option.help for option in typer.main.get_command(app).commands["finetune"].params}
    assert all(kind in shown["kind"] for kind in KINDS)


def test_stages_and_redo_are_passed_on(runs: list[Any]) -> None:
    options = "--model m --data a --output o --stage data --stage states --redo data"
    assert _run(*options.split()) == 0
    assert runs[0][2] == {"stages": ("data", "states"), "redo": "data"}


def test_preview_shows_and_runs_nothing(runs: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--model", "m", "--data", "a", "--preview") == 0
    assert [name for name, *_ in runs] == ["preview"]
    assert capsys.readouterr().out == "the preview\n"


def test_output_is_asked_for(runs: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--model", "m", "--data", "a") == 2
    assert "--output" in capsys.readouterr().err and not runs


def test_wrong_setting_is_one_message(runs: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--model", "m", "--data", "a", "--output", "o", "--held-out", "2") == 2
    error = capsys.readouterr().err
    assert "held_out" in error and "Traceback" not in error and not runs


def test_stages_named_are_run_and_no_others(tiny_folder: Path, tmp_path: Path) -> None:
    data, answer = tmp_path / "chats.jsonl", {"role": "assistant", "content": "answer"}
    records = [
        {"source": ("even", "odd")[number % 2], "messages": [{"role": "user", "content": str(number)}, answer]}
        for number in range(20)
    ]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["--model", str(tiny_folder), "--data", str(data), "--output", str(tmp_path / "run"), "--stage", "data"]
    assert _run(*words, "--source", "even", "--held-out", "0.2") == 0
    done = json.loads((tmp_path / "run" / "data.done.json").read_text())
    assert done["result"]["sources"] == {"even": 10}
    assert not (tmp_path / "run" / "states.done.json").exists()


def test_what_is_not_said_of_given_heads_is_theirs(runs: list[Any]) -> None:
    assert _run(*"--model m --data a --output o --init-from smollm2-135m --adapter-rank 4".split()) == 0
    config = runs[0][1]
    assert (config.kind, config.num_heads, config.adapter_rank) == ("fused", 7, 4)
    packaged = read_config(heads_folder("smollm2-135m")).heads
    assert config.options == packaged.options and config.num_layers == packaged.num_layers


def test_what_is_said_otherwise_of_given_heads_is_refused_at_once(
    runs: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(*"--model m --data a --output o --init-from smollm2-135m --num-heads 4".split()) == 2
    assert "num_heads must be that of init_from = 'smollm2-135m', which is 7, got 4" in capsys.readouterr().err
    assert _run(*"--model m --data a --output o --init-from smollm2-135m --option tied=false".split()) == 2
    assert "options must be that of init_from = 'smollm2-135m'" in capsys.readouterr().err
    assert _run(*"--model m --data a --output o --init-from smollm2-135m --option tied".split()) == 2
    assert "options must be written name=value, got 'tied'" in capsys.readouterr().err
    assert _run(*"--model m --data a --output o --init-from nowhere".split()) == 2 and not runs


def test_the_module_is_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["medusa_spec", "finetune", "--help"])
        runpy.run_module("medusa_spec", run_name="__main__")
    assert stopped.value.code == 0 and "--init-from" in capsys.readouterr().out


def test_preview_marks_the_answers_of_real_data(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"messages": turns}))
    assert _run("--model", str(tiny_folder), "--data", str(data), "--preview") == 0
    shown = capsys.readouterr().out
    assert "⟦answer<|im_end|>⟧" in shown and "⟦question" not in shown
    assert list(tmp_path.iterdir()) == [data]
