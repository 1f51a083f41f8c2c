"""The preview of the mask."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medusa_spec.errors import ConfigError, DataError
from medusa_spec.finetune import FinetuneConfig, preview
from medusa_spec.finetune.mask_preview import BRACKETS, COLOUR

MakeConfig = Callable[..., FinetuneConfig]


def show(make_config: MakeConfig, folder: Path, *records: dict[str, Any], limit: int = 3, **changes: Any) -> str:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    shown = preview(make_config(folder / "run", data=(str(path),), **changes), limit=limit, colour=False)
    assert not (folder / "run").exists()
    return shown.replace(str(path), "a.jsonl")


def test_the_preview_marks_the_answers(make_config: MakeConfig, tmp_path: Path) -> None:
    records = [{"prompt": f"Q{n}", "completion": "Yes ok"} for n in range(5)]
    shown = show(make_config, tmp_path, *records, limit=2)
    opening, closing = BRACKETS
    for n in (0, 1):
        assert f"Q{n}<|im_end|>\n<|im_start|>assistant\n{opening}Yes ok<|im_end|>{closing}\n" in shown
    assert "Q2" not in shown and "--- a.jsonl:1 (prompt and completion): 7 of " in shown
    path = str(tmp_path / "a.jsonl")
    assert COLOUR[0] in preview(make_config(tmp_path / "run", data=(path,)), colour=True)


def test_every_answer_is_counted_and_what_is_left_out_is_told(make_config: MakeConfig, tmp_path: Path) -> None:
    turns = []
    for number, weight in enumerate((1, 0, 1)):
        turns += [{"from": "human", "value": f"Q{number}"}, {"from": "gpt", "value": "Yes", "weight": weight}]
    loop = {"prompt": "Go", "completion": "ab" * 40, "finished": False}
    shown = show(make_config, tmp_path, {"conversations": turns}, loop, loop, max_length=76)
    assert "a.jsonl:1 (conversations): 7 of 76 tokens trained on, by answer 4 + 3" in shown
    assert "! tokens cut off at max_length: 2" in shown and "! answers of weight 0, not trained on: 1" in shown
    assert "! answers that end in repetition, trained on all the same: 1" in shown
    assert "! the last answer did not end: its end of turn is not trained on" in shown
    dropped = show(make_config, tmp_path, {"conversations": turns}, loop, max_length=76, drop_loops=True)
    assert "a.jsonl:2 (prompt and completion): 0 of 76 tokens trained on, by answer 0" in dropped
    assert "! answers that end in repetition, not trained on: 1" in dropped and "! skipped" in dropped


def test_tool_calls_are_shown_as_the_target_reads_them(make_config: MakeConfig, tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "tool_calls": [{"name": "find", "arguments": {"a": 1}}]},
        {"role": "tool", "content": "found"},
        {"role": "assistant", "content": "A"},
    ]
    with pytest.raises(DataError, match="the call of 'find' is left out"):  # the tiny tokenizer's template has no calls
        show(make_config, tmp_path, {"messages": turns})


def test_records_that_are_left_out_are_told_at_the_end(make_config: MakeConfig, tmp_path: Path) -> None:
    bad, empty = {"question": "Q"}, {"prompt": "Q", "completion": "", "finished": False}
    records = [bad, {"prompt": "Q", "completion": "A"}, empty]
    shown = show(make_config, tmp_path, *records, skip_unusable=True)
    assert shown.startswith("--- a.jsonl:2 (prompt and completion): 2 of ")
    assert "--- left out: a.jsonl:1: a record must have" in shown
    assert "--- left out: a.jsonl:3: no token would be trained on" in shown
    with pytest.raises(DataError, match="a record must have"):
        show(make_config, tmp_path, *records)


def test_where_the_target_answers_itself_its_prompts_are_shown(make_config: MakeConfig, tmp_path: Path) -> None:
    data = tmp_path / "asked.jsonl"
    data.write_text(json.dumps({"prompt": "red"}) + "\n" + json.dumps({"prompt": "blue", "completion": "cat"}) + "\n")
    config = make_config(tmp_path / "run", data=str(data), distil=True)
    shown = preview(config, colour=False)
    assert shown.count("the target writes the answers itself") == 2 and "⟦" not in shown and "cat" not in shown
    assert shown.endswith("blue<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(ConfigError, match="'self' is what the model will write"):
        preview(make_config(tmp_path / "run", data="self"))
