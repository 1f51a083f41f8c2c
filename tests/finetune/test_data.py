"""The data stage."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from medusa_spec.errors import DataError
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data import held_out_keys, held_out_prompts, held_out_records, run_data, settings
from medusa_spec.finetune.records import parse_record, select
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.tokens import TokenData

MakeConfig = Callable[..., FinetuneConfig]


def run(config: FinetuneConfig) -> dict[str, TokenData]:
    run_data(config, Target(config))
    return {split: TokenData(Path(config.output) / "data", split) for split in ("train", "held_out")}


def texts(data: TokenData) -> set[tuple[int, ...]]:
    return {tuple(conversation.input_ids.tolist()) for conversation in data}


def test_the_split_does_not_depend_on_order(make_config: MakeConfig, chats: Path, tmp_path: Path) -> None:
    lines = chats.read_text().splitlines()
    random.Random(1).shuffle(lines)
    (tmp_path / "shuffled.jsonl").write_text("\n".join(lines))
    one = run(make_config(tmp_path / "one"))
    two = run(make_config(tmp_path / "two", data=(str(tmp_path / "shuffled.jsonl"),)))
    assert texts(one["train"]) == texts(two["train"]) and texts(one["held_out"]) == texts(two["held_out"])
    assert 5 <= len(one["held_out"]) <= 40  # a tenth of 200, by hash
    assert not texts(one["train"]) & texts(one["held_out"])


def test_added_conversations_move_no_other() -> None:
    records = [parse_record({"prompt": str(n), "completion": "A"}, "") for n in range(400)]
    few, many = held_out_keys(records[:200], 0.1), held_out_keys(records, 0.1)
    assert few == many & {record.split_key() for record in records[:200]}


def test_there_is_always_something_held_out_and_something_to_train_on() -> None:
    records = [parse_record({"prompt": str(n), "completion": "A"}, "") for n in range(2)]
    for share in (1e-6, 0.999999):
        assert len(held_out_keys(records, share)) == 1
    with pytest.raises(DataError, match="two different prompts"):
        held_out_keys(records[:1], 0.1)


def test_long_conversations_are_cut_or_skipped_and_counted(make_config: MakeConfig, tmp_path: Path) -> None:
    records = [{"prompt": f"{n:02d}", "completion": "yes indeed"} for n in range(8)]
    records += [{"prompt": "cut", "completion": "x" * 200}, {"prompt": "y" * 200, "completion": "skipped"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = make_config(tmp_path / "run", data=(str(tmp_path / "a.jsonl"),), max_length=64, held_out=0.3)
    manifest = run_data(config, Target(config))
    assert (manifest["records"], manifest["cut"], manifest["skipped"]) == (10, 2, 1)
    data = run(config)
    assert len(data["train"]) + len(data["held_out"]) == 9
    assert max(data["train"].lengths() + data["held_out"].lengths()) == 64


def test_only_the_sources_asked_for_are_kept(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path, sources=("odd",))
    manifest = run_data(config, Target(config))
    assert manifest["sources"] == {"odd": 100} and manifest["licenses"] == {"CC0-1.0": 100}
    with pytest.raises(DataError, match="'even': 100"):
        list(select(config.data, ("neither",)))


def test_changed_data_are_noticed(make_config: MakeConfig, chats: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_text(chats.read_text())
    config = make_config(tmp_path / "run", data=(str(copy),))
    run(config)
    copy.write_text(chats.read_text().replace("cat", "cow"))
    with pytest.raises(ValueError, match="inputs was"):
        run(config)


def test_held_out_prompts_end_before_the_first_answer_and_sources_take_turns(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(tmp_path, held_out=0.2)
    prompts = held_out_prompts(config, 6)
    assert [source for _, source in prompts] in (["even", "odd"] * 3, ["odd", "even"] * 3)
    assert all(messages[-1]["role"] == "user" for messages, _ in prompts)
    data = run(config)
    shown = {Target(config).tokenizer.decode(c.input_ids) for c in data["held_out"]}
    assert all(any(messages[0]["content"] in text for text in shown) for messages, _ in prompts)
    assert len(held_out_prompts(replace(config, sources=("odd",)), 2)) == 2


def manifest_of(make_config: MakeConfig, folder: Path, records: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """The manifest of a data stage over six records and these."""
    path = folder / "records.jsonl"
    others = [{"prompt": f"other {n}", "completion": "yes"} for n in range(6)]
    path.write_text("".join(json.dumps(record) + "\n" for record in [*others, *records]))
    changes = {"data": (str(path),), "held_out": 0.5} | changes
    config = make_config(folder / f"run-{len(list(folder.iterdir()))}", **changes)
    return run_data(config, Target(config))


def test_records_that_cannot_be_used_stop_the_run_or_are_counted(make_config: MakeConfig, tmp_path: Path) -> None:
    bad = [
        {"question": "Q"},
        {"conversations": [{"from": "human", "value": "Q"}]},
        {"prompt": "Q", "completion": "", "finished": False},
    ]
    with pytest.raises(DataError, match="records.jsonl:7: a record must have"):
        manifest_of(make_config, tmp_path, bad)
    found = manifest_of(make_config, tmp_path, bad, skip_unusable=True)
    assert found["records"] == 7 and sum(split["conversations"] for split in found["splits"].values()) == 6
    assert found["unusable"]["records"] == 3
    places = [error.split("records.jsonl:")[1][:2] for error in found["unusable"]["first"]]
    assert places == ["7:", "8:", "9:"]


def test_nothing_usable_is_refused_with_the_first_reason(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "Q"}\n' * 3)
    config = make_config(tmp_path / "run", data=(str(tmp_path / "a.jsonl"),), skip_unusable=True)
    with pytest.raises(DataError, match="a.jsonl:1: a record must have"):
        run_data(config, Target(config))


def test_looping_answers_and_copies_are_counted_and_left_out_if_wanted(make_config: MakeConfig, tmp_path: Path) -> None:
    loop = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "ab" * 40}]}
    late = {"messages": [*loop["messages"], {"role": "user", "content": "y"}, {"role": "assistant", "content": "well"}]}
    copies = [{"prompt": "other 1", "completion": "yes"}] * 3
    records = [loop, late, *copies]
    kept = manifest_of(make_config, tmp_path, records)
    assert (kept["duplicates"], kept["skipped"], kept["answers"]["looping"]) == (3, 0, 2)
    assert sum(split["conversations"] for split in kept["splits"].values()) == 11
    dropped = manifest_of(make_config, tmp_path, records, drop_loops=True, drop_duplicates=True)
    assert (dropped["duplicates"], dropped["skipped"], dropped["answers"]["looping"]) == (3, 1, 1)
    assert sum(split["conversations"] for split in dropped["splits"].values()) == 7
    answers = sum(split["answer_tokens"] for split in dropped["splits"].values())
    assert answers == 6 * len("yes.") + len("well.")


def test_only_the_first_records_are_read_if_wanted(make_config: MakeConfig, tmp_path: Path) -> None:
    records = [{"prompt": str(n), "completion": "A"} for n in range(9)]
    assert manifest_of(make_config, tmp_path, records, max_records=5)["records"] == 5


def test_settings_at_their_default_are_those_of_older_runs(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    old = {"model", "revision", "inputs", "sources", "max_length", "held_out", "chat_template", "vocabulary"}
    old |= {"eos_ids"}  # compared where it was noted
    assert set(settings(config, Target(config))) == old
    for name in ("skip_unusable", "drop_loops", "drop_duplicates"):
        changed = settings(replace(config, **{name: True}), Target(config))
        assert set(changed) == old | {name}


def test_held_out_prompts_are_changed_for_the_template_as_in_training(make_config: MakeConfig, tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
    ]
    tool = {"type": "function", "function": {"name": "f"}}
    lines = [{"messages": turns, "tools": [tool]}, {"prompt": "P", "completion": "A"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = make_config(tmp_path / "run", data=(str(tmp_path / "a.jsonl"),), held_out=0.999)
    tokenizer = Target(config).tokenizer
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + str(
        tokenizer.chat_template
    )
    found = {record.messages[0]["content"]: record for record in held_out_records(config, 5, tokenizer)}
    plain = {record.messages[0]["content"] for record in held_out_records(config, 5)}
    assert set(found) <= {"S\n\nQ", "P"} and plain <= {"S", "P"} and len(found) == len(plain) == 1
    merged = found.get("S\n\nQ")
    assert merged is None or (len(merged.messages) == 1 and merged.tools == (tool,))


def test_what_is_trained_on_is_the_text_to_the_letter(make_config: MakeConfig, tmp_path: Path) -> None:
    said = "  ÉCLAIR, Straße, ﬁ — Ελληνικά\t\n\nİstanbul ½ 你好 \u200d "
    turns = [{"role": "user", "content": said}, {"role": "assistant", "content": said + "A"}]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"messages": turns[:1] * n + turns[1:]}) + "\n" for n in (1, 2, 3, 4))
    )
    config = make_config(tmp_path / "run", data=(str(tmp_path / "a.jsonl"),), held_out=0.5)
    tokenizer = Target(config).tokenizer
    shown = {tokenizer.decode(c.input_ids) for data in run(config).values() for c in data}
    expected = {tokenizer.apply_chat_template(turns[:1] * n + turns[1:], tokenize=False) for n in (1, 2, 3, 4)}
    assert shown == expected and all(said in text for text in shown)
