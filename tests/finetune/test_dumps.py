"""Files of dumped states."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_spec.errors import CheckpointError, ConfigError
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data import run_data
from medusa_spec.finetune.dumps import Dump, dump_files, dump_name, main, read_states, write_dump
from medusa_spec.finetune.states import run_states
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.tokens import TokenData

MakeConfig = Callable[..., FinetuneConfig]


def put(path: Path, ids: list[int], columns: int = 2, hidden: int = 4, **changes: Any) -> torch.Tensor:
    """A file as an engine writes it."""
    states = torch.randn(len(ids), columns, hidden)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"hidden_states": states, "token_ids": torch.tensor(ids)} | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    return states


def test_texts_are_found_by_their_tokens_wherever_they_lie(tmp_path: Path) -> None:
    put(tmp_path / "cmpl-1.safetensors", [1, 2, 3, 4])
    put(tmp_path / "deeper" / "hs_0.safetensors", [1, 2, 3, 5])
    (tmp_path / "cmpl-1.safetensors.lock").touch()
    dump = Dump(tmp_path, 100)
    assert (dump.columns, dump.hidden_size) == (2, 4)
    assert dump.find(torch.tensor([1, 2, 3, 5]), 4) == tmp_path / "deeper" / "hs_0.safetensors"
    assert dump.find(torch.tensor([1, 2, 3]), 3) is None and dump.find(torch.tensor([2, 3, 4]), 1) is None


def test_the_last_tokens_may_be_missing_if_they_are_not_needed(tmp_path: Path) -> None:
    put(tmp_path / "a.safetensors", [1, 2, 3])
    ids = torch.tensor([1, 2, 3, 4, 5])
    assert Dump(tmp_path, 100).find(ids, 3) is not None
    assert Dump(tmp_path, 100).find(ids, 4) is None


def test_a_text_that_was_cut_is_found_by_what_is_left_of_it(tmp_path: Path) -> None:
    put(tmp_path / "a.safetensors", [1, 2, 3, 4, 5])
    assert Dump(tmp_path, 3).find(torch.tensor([1, 2, 3]), 3) is not None
    assert Dump(tmp_path, 4).find(torch.tensor([1, 2, 3]), 3) is None


def test_rows_and_columns_are_those_asked_for(tmp_path: Path) -> None:
    states = put(tmp_path / "a.safetensors", [1, 2, 3], columns=3)
    found = read_states(tmp_path / "a.safetensors", torch.tensor([2, 0]), [2, 0])
    assert torch.equal(found, states[[2, 0]][:, [2, 0]])


def test_the_name_of_a_dump_is_that_of_its_files(tmp_path: Path) -> None:
    put(tmp_path / "one" / "a.safetensors", [1, 2, 3])
    put(tmp_path / "two" / "a.safetensors", [1, 2, 3])
    assert dump_name(tmp_path / "one") == dump_name(tmp_path / "two")
    put(tmp_path / "two" / "b.safetensors", [1])
    assert dump_name(tmp_path / "one") != dump_name(tmp_path / "two")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": None}, r"hidden_states and token_ids, got \['hidden_states'\]"),
        ({"token_ids": torch.arange(2)}, r"\[T, L, H\] and token_ids \[T\], got \[3, 2, 4\] and \[2\]"),
        ({"hidden_states": torch.zeros(3, 4)}, r"got \[3, 4\] and \[3\]"),
    ],
)
def test_a_file_of_another_layout_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    put(tmp_path / "a.safetensors", [1, 2, 3], **changes)
    with pytest.raises(CheckpointError, match=rf"a\.safetensors must hold .*{message}"):
        Dump(tmp_path, 9)


def test_a_file_that_is_not_whole_is_named(tmp_path: Path) -> None:
    put(tmp_path / "a.safetensors", [1, 2, 3])
    data = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(data[:-5])
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be read .*may be writing it still"):
        Dump(tmp_path, 9)


def test_files_of_two_runs_of_an_engine_are_not_mixed(tmp_path: Path) -> None:
    put(tmp_path / "a.safetensors", [1, 2, 3])
    put(tmp_path / "b.safetensors", [1, 2, 3], columns=3)
    with pytest.raises(CheckpointError, match=r"b\.safetensors must hold 2 columns of 4 .*, got 3 of 4"):
        Dump(tmp_path, 9)


def test_states_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    states = torch.ones(3, 2, 4)
    states[1, 1, 1] = torch.nan
    put(tmp_path / "a.safetensors", [1, 2, 3], hidden_states=states)
    rows = torch.arange(3)
    assert read_states(tmp_path / "a.safetensors", rows, [0]).isfinite().all()
    with pytest.raises(CheckpointError, match=r"a\.safetensors holds states that are not finite"):
        read_states(tmp_path / "a.safetensors", rows, [0, 1])


@pytest.mark.parametrize(("file", "message"), [(None, "holds none"), ("a.safetensors.zst", "compressed ones")])
def test_a_folder_without_files_is_refused(tmp_path: Path, file: str | None, message: str) -> None:
    if file:
        (tmp_path / file).touch()
    with pytest.raises(ConfigError, match=f"states_dump must be a folder of .*{message}"):
        Dump(tmp_path, 9)


@pytest.fixture
def whole(make_config: MakeConfig, tmp_path: Path) -> FinetuneConfig:
    """A run of states of whole texts, of two layers beside h."""
    config = make_config(tmp_path / "whole", kind="eagle3", sources=("even",))
    run_data(config, Target(config))
    run_states(config, Target(config))
    return config


def stored(config: FinetuneConfig, split: str) -> dict[int, dict[str, torch.Tensor]]:
    """Texts of a store, by conversation."""
    store = StateStore(Path(config.output), split, 1)
    return {int(store.conversations[text.shard][text.start]): store.batch([text]) for text in store.texts()}


def test_a_store_that_is_written_and_read_has_the_same_bits(whole: FinetuneConfig, tmp_path: Path) -> None:
    main(["export", whole.output, str(tmp_path / "dump")])
    count = len(list((tmp_path / "dump").iterdir()))
    assert count == sum(len(TokenData(Path(whole.output) / "data", split)) for split in ("train", "held_out"))
    again = replace(whole, output=str(tmp_path / "again"), states_dump=str(tmp_path / "dump"))
    run_data(again, Target(again))
    manifest = run_states(again, Target(again))
    assert manifest["conversations_from"] == {"states_dump": count, "target": 0}
    for split in ("train", "held_out"):
        one, two = stored(whole, split), stored(again, split)
        assert one.keys() == two.keys() and one
        for number in one:
            assert one[number].keys() == two[number].keys() >= {"h", "layers"}
            assert all(torch.equal(one[number][name], two[number][name]) for name in one[number])


def test_what_is_written_is_of_the_engines_layout(whole: FinetuneConfig, tmp_path: Path) -> None:
    write_dump(Path(whole.output), tmp_path / "dump")
    data = TokenData(Path(whole.output) / "data", "train")
    found = load_file(tmp_path / "dump" / "train-0000003.safetensors")
    read = int(data[3].mask.nonzero()[-1])  # up to the token before the last that was chosen
    assert found["token_ids"].dtype == torch.int64 and found["token_ids"].tolist() == data[3].input_ids[:read].tolist()
    assert found["hidden_states"].shape == (read, 3, 32)
    h = stored(whole, "train")[3]["h"][0]
    assert torch.equal(found["hidden_states"][:, 2], h)


def test_an_export_that_was_killed_and_done_again_holds_each_text_once(whole: FinetuneConfig, tmp_path: Path) -> None:
    left = tmp_path / "dump" / ".train-0000003.safetensors.x.unfinished"
    left.mkdir(parents=True)
    (left / "train-0000003.safetensors").write_bytes(b"half")
    assert len(dump_files(tmp_path / "dump")) == 1
    count = write_dump(Path(whole.output), tmp_path / "dump")
    assert len(dump_files(tmp_path / "dump")) == count


def test_states_of_answers_alone_cannot_be_written(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", sources=("even",))
    run_data(config, Target(config))
    run_states(config, Target(config))
    with pytest.raises(ConfigError, match="are of answers alone"):
        write_dump(Path(config.output), tmp_path / "dump")


def test_requests_are_the_conversations_that_the_run_reads(finished: FinetuneConfig, tmp_path: Path) -> None:
    main(["requests", finished.output, str(tmp_path / "ask.jsonl")])
    asked = [json.loads(line)["prompt_token_ids"] for line in (tmp_path / "ask.jsonl").read_text().splitlines()]
    data = [TokenData(Path(finished.output) / "data", split) for split in ("train", "held_out")]
    assert asked == [conversation.input_ids.tolist() for split in data for conversation in split]
