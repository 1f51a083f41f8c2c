"""The data stage."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from medusa_spec.errors import DataError
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data import held_out_keys, held_out_prompts, run_data, select
from medusa_spec.finetune.records import parse_record
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
