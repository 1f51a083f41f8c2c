"""The self stage."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_spec.errors import DataError
from medusa_spec.finetune import FinetuneConfig, run_pipeline, selfdata
from medusa_spec.finetune.selfdata import run_self, user_opening
from medusa_spec.finetune.target import Target

MakeConfig = Callable[..., FinetuneConfig]


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FinetuneConfig:
    """A run without data, of three small batches."""
    monkeypatch.setattr(selfdata, "SHARD", 8)
    return make_config(
        tmp_path / "run", data="self", self_conversations=24, self_new_tokens=20, held_out=0.3, tree_size=2
    )


def lines(config: FinetuneConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.output) / "self.jsonl").read_text().splitlines()]


def test_answers_are_the_targets_own_greedy_ones(config: FinetuneConfig) -> None:
    target = Target(config)
    run_self(config, target)
    written = lines(config)
    assert written
    for record in written[:5]:
        question, answer = record["messages"]
        ids = target.tokenizer.apply_chat_template(
            [question], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        out = target.model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist()
        ended = target.tokenizer.eos_token_id in out
        assert record["finished"] == ended
        assert target.tokenizer.decode(out[:-1] if ended else out) == answer["content"]


def test_a_stopped_and_resumed_run_writes_the_same(
    config: FinetuneConfig, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_self(config, Target(config))
    values = config.to_dict() | {"output": str(tmp_path / "stopped")}
    other = FinetuneConfig.from_dict(values)
    real, calls = selfdata.write_shard, []

    def stop(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(selfdata, "write_shard", stop)
    with pytest.raises(KeyboardInterrupt):
        run_self(other, Target(other))
    torch.manual_seed(99)
    run_self(other, Target(other))
    assert lines(other) == lines(config) and len(calls) == 4  # two whole batches were kept


def test_prompts_begin_with_the_openings_in_turn(config: FinetuneConfig) -> None:
    openings = ("red cat ", "blue dog ")
    given = FinetuneConfig.from_dict(config.to_dict() | {"self_openings": openings})
    run_self(given, Target(given))
    asked = [record["messages"][0]["content"] for record in lines(given)]
    assert {words[: len("red cat")].strip() for words in asked} == {"red cat", "blue do"}
    assert all(words.startswith(tuple(opening.strip() for opening in openings)) for words in asked)


def test_heads_can_be_trained_without_any_data(config: FinetuneConfig) -> None:
    run_pipeline(config, stages=("self", "data", "states", "train", "calibrate"))
    assert (Path(config.output) / "heads" / "heads.safetensors").exists()


def test_other_data_need_no_self_stage(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    assert run_self(config, Target(config)) == {} and not (tmp_path / "self.done.json").exists()


def test_the_opening_is_what_stands_before_the_users_words(config: FinetuneConfig) -> None:
    target = Target(config)
    assert user_opening(target) == "<|im_start|>user\n"
    target.tokenizer.chat_template = None
    with pytest.raises(DataError, match="chat template"):
        user_opening(target)


def test_separators_of_lines_in_an_answer_part_no_lines(
    config: FinetuneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shard(*args: Any) -> list[dict[str, Any]]:
        turns = [{"role": "user", "content": "a\u2028b"}, {"role": "assistant", "content": "c\u0085d\ne"}]
        return [{"source": "self", "finished": True, "loops": False, "messages": turns}]

    monkeypatch.setattr(selfdata, "write_shard", shard)
    assert run_self(config, Target(config))["conversations"] == 1
    (line,) = (Path(config.output) / "self.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
    assert json.loads(line)["messages"][1]["content"] == "c\u0085d\ne"


def test_a_model_that_never_ends_is_refused(config: FinetuneConfig) -> None:
    target = Target(config)
    target.__dict__["eos_ids"] = frozenset()
    with pytest.raises(DataError, match="end-of-sequence"):
        user_opening(target)
