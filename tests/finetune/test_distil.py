"""The distil stage."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_spec.errors import ConfigError, DataError
from medusa_spec.finetune import FinetuneConfig, distil, run_pipeline
from medusa_spec.finetune.distil import run_distil
from medusa_spec.finetune.target import Target
from medusa_spec.testing import save_tiny_model

MakeConfig = Callable[..., FinetuneConfig]


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FinetuneConfig:
    """A run over prompts alone, chats of two rounds, and one that is too long, in shards of four."""
    monkeypatch.setattr(distil, "SHARD", 4)
    records: list[dict[str, Any]] = [{"prompt": f"{n}: red cat", "source": "prompts"} for n in range(5)]
    for number in range(5):
        turns = [("user", f"{number}: blue"), ("assistant", "nobody says this"), ("user", "two"), ("assistant", "nor")]
        records.append({"messages": [{"role": role, "content": text} for role, text in turns], "license": "CC0-1.0"})
    records.append({"prompt": "red " * 500})
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return make_config(
        tmp_path / "run", data=str(path), distil=True, distil_new_tokens=16, max_length=200, tree_size=2, held_out=0.3
    )


def lines(config: FinetuneConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.output) / "distil.jsonl").read_text().splitlines()]


def greedy(target: Target, messages: list[dict[str, str]]) -> tuple[str, bool]:
    # With its mask: an answer may hold the padding token, which generate would otherwise not see.
    given = target.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = target.model.generate(**given, max_new_tokens=16, do_sample=False)[0, given["input_ids"].shape[1] :].tolist()
    ended = target.tokenizer.eos_token_id in out
    return str(target.tokenizer.decode(out[:-1] if ended else out)), ended


def _first_ended(record: dict[str, Any], target: Target) -> bool:
    return greedy(target, record["messages"][:1])[1]


def test_every_answer_is_the_targets_own_greedy_one(config: FinetuneConfig) -> None:
    """Also the second ones, behind its own first ones."""
    target = Target(config)
    counts = run_distil(config, target)
    written = lines(config)
    assert counts["conversations"] == len(written) == 10 and counts["dropped"] == 1
    for record in written:
        turns = record["messages"]
        for place, turn in enumerate(turns):
            if turn["role"] == "assistant":
                text, ended = greedy(target, turns[:place])
                assert turn["content"] == text
        assert record["finished"] == ended
        assert len(turns) == (4 if "source" not in record and _first_ended(record, target) else 2)
    assert counts["unfinished"] == sum(not record["finished"] for record in written)
    assert {record.get("source") for record in written} == {"prompts", None}


@pytest.mark.parametrize("before", [[], [("system", "be red")]])
def test_a_greeting_before_anybody_asked_is_kept_as_it_stands(
    config: FinetuneConfig, tmp_path: Path, before: list[tuple[str, str]]
) -> None:
    """It is no answer: behind it the target answers what is asked."""
    turns = [*before, ("assistant", "hello"), ("user", "red cat"), ("assistant", "nobody says this")]
    path = tmp_path / "greeted.jsonl"
    path.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    greeted = FinetuneConfig.from_dict(config.to_dict() | {"data": str(path), "output": str(tmp_path / "greeted")})
    target = Target(greeted)
    run_distil(greeted, target)
    ((*asked, answer),) = [record["messages"] for record in lines(greeted)]
    assert [(turn["role"], turn["content"]) for turn in asked] == turns[:-1]
    assert answer["content"] == greedy(target, asked)[0]


def test_answers_of_another_target_under_the_same_name_are_not_mixed_in(config: FinetuneConfig, tmp_path: Path) -> None:
    shutil.copytree(config.model, tmp_path / "model")
    named = FinetuneConfig.from_dict(config.to_dict() | {"model": str(tmp_path / "model")})
    run_distil(named, Target(named))
    save_tiny_model(tmp_path / "model", seed=1, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"stage 'distil' .* with other settings: weights was"):
        run_distil(named, Target(named))


def test_a_stopped_and_resumed_run_writes_the_same(
    config: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = FinetuneConfig.from_dict(config.to_dict() | {"distil_temperature": 0.8})
    run_distil(sampled, Target(sampled))
    other = FinetuneConfig.from_dict(sampled.to_dict() | {"output": str(tmp_path / "stopped")})
    real, calls = distil.answer_shard, []

    def stop(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(distil, "answer_shard", stop)
    with pytest.raises(KeyboardInterrupt):
        run_distil(other, Target(other))
    run_distil(other, Target(other))
    assert lines(other) == lines(sampled) and len(calls) == 4  # two whole shards were kept


def test_answers_are_sampled_at_the_temperature_asked_for(config: FinetuneConfig, tmp_path: Path) -> None:
    run_distil(config, Target(config))
    hot = FinetuneConfig.from_dict(config.to_dict() | {"distil_temperature": 2.0, "output": str(tmp_path / "hot")})
    run_distil(hot, Target(hot))
    assert lines(hot) != lines(config)


def test_heads_are_trained_on_the_targets_answers(config: FinetuneConfig) -> None:
    run_pipeline(config, stages=("distil", "data", "states", "train", "calibrate"))
    record = json.loads((Path(config.output) / "data.done.json").read_text())
    assert record["result"]["records"] == 10
    assert (Path(config.output) / "heads" / "heads.safetensors").exists()


def test_without_distil_the_stage_does_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    assert run_distil(config, Target(config)) == {} and not (tmp_path / "distil.done.json").exists()


def test_texts_without_turns_are_refused(config: FinetuneConfig, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "red cat"}\n')
    texts = FinetuneConfig.from_dict(config.to_dict() | {"data": str(path)})
    with pytest.raises(DataError, match=r"texts.jsonl:1.*needs turns"):
        run_distil(texts, Target(texts))


def test_the_models_own_prompts_are_answered_already(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="distil must be off"):
        make_config(tmp_path, data="self", distil=True)


def test_tools_and_what_cannot_be_used_are_dealt_with_as_in_the_data_stage(
    config: FinetuneConfig, tmp_path: Path
) -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    asked = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    records = [{"messages": asked, "tools": [tool]}, {"question": "no form"}, {"prompt": "P"}, {"prompt": "never read"}]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    changes = {"data": [str(tmp_path / "asked.jsonl")], "max_records": 3}
    stops = FinetuneConfig.from_dict(config.to_dict() | changes)
    with pytest.raises(DataError, match=r"asked\.jsonl:2: a record must have"):
        run_distil(stops, Target(stops))
    skips = FinetuneConfig.from_dict(
        config.to_dict() | changes | {"skip_unusable": True, "output": str(tmp_path / "skips")}
    )
    target = Target(skips)
    target.tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + str(target.tokenizer.chat_template)
    )
    assert run_distil(skips, target)["unusable"] == 1
    first, second = lines(skips)
    assert first["messages"][0] == {"role": "user", "content": "S\n\nQ"} and first["tools"] == [tool]
    assert second["messages"][0]["content"] == "P" and "tools" not in second
    given = target.tokenizer.apply_chat_template(
        first["messages"][:1], tools=[tool], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = target.model.generate(**given, max_new_tokens=16, do_sample=False)[0, given["input_ids"].shape[1] :].tolist()
    ended = target.tokenizer.eos_token_id in out
    assert first["messages"][1]["content"] == target.tokenizer.decode(out[:-1] if ended else out)
