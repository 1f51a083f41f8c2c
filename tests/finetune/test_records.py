"""Conversations as they lie in files."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from medusa_spec.errors import DataError
from medusa_spec.finetune.records import Record, fingerprint, parse_record, read_records

CHAT = {"source": "s", "messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}
PAIR = {"prompt": "Q", "completion": "A", "licence": "MIT", "finished": False}


def write(path: Path, *values: Any) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


def test_each_form_of_record_is_read(tmp_path: Path) -> None:
    chat, pair, text = read_records(write(tmp_path / "a.jsonl", CHAT, PAIR, {"text": "T"}))
    assert [m["content"] for m in chat.messages] == [m["content"] for m in pair.messages] == ["Q", "A"]
    assert (chat.source, chat.finished, pair.license, pair.finished) == ("s", True, "MIT", False)
    assert text.text == "T" and text.messages == ()


def test_compressed_files_and_parquet_read_as_plain_ones(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    plain = list(read_records(write(tmp_path / "a.jsonl", CHAT, CHAT)))
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write((tmp_path / "a.jsonl").read_text())
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([CHAT, CHAT]), tmp_path / "a.parquet")
    for name in ("a.jsonl.gz", "a.parquet"):
        other = list(read_records(str(tmp_path / name)))
        assert [r.messages for r in other] == [r.messages for r in plain]
        assert other[1].place == f"{tmp_path / name}:2"


def test_a_folder_is_read_as_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", CHAT)
    assert [r.messages for r in read_records(str(tmp_path / "set"))] == [parse_record(CHAT, "").messages]


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(CHAT) + "\n\n{broken\n")
    with pytest.raises(DataError, match=r"bad\.jsonl:3: .*\{broken"):
        list(read_records(str(path)))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="at least one record"):
        list(read_records(str(tmp_path / "empty.jsonl")))


def test_a_missing_file_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file"):
        list(read_records(str(tmp_path / "none.jsonl")))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], "JSON object, got list"),
        ({"question": "Q"}, r"`messages`.*\['question'\]"),
        ({"text": ""}, "not be empty"),
        ({"messages": []}, "non-empty"),
        ({"messages": [{"role": "user"}]}, "turn 0 must have `role` and `content`"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "got 'bot'"),
        ({"messages": [{"role": "user", "content": "x"}]}, "assistant turn"),
        ({"text": "x", "source": 3}, "source must be a string, got int"),
    ],
)
def test_a_record_that_cannot_be_used_is_refused(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"place: .*{message}"):
        parse_record(value, "place")


def test_two_answers_to_one_prompt_share_their_split_key() -> None:
    def record(question: str, answer: str) -> Record:
        return parse_record({"prompt": question, "completion": answer}, "")

    assert record("Q", "A").split_key() == record("Q", "B").split_key() != record("R", "A").split_key()


def test_the_fingerprint_is_that_of_the_contents(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1.jsonl", CHAT), write(tmp_path / "2.jsonl", CHAT)
    assert fingerprint(one) == fingerprint(two) != fingerprint(write(tmp_path / "3.jsonl", PAIR))
