"""Conversations as they lie in files."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from medusa_spec.errors import DataError
from medusa_spec.finetune.records import Record, fingerprint, first_answer, parse_record, read_records

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


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"prompt": 5, "completion": "A"}, "texts or lists of turns, got int"),
        ({"prompt": "Q", "completion": {"a": 1}}, "texts or lists of turns, got dict"),
        ({"messages": [{"role": "user", "content": 5}, CHAT["messages"][1]]}, "turn 0: content must be a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, CHAT["messages"][1]]}, "turn 0: content"),
        ({"messages": [{"role": "user", "content": "\ud83d"}, CHAT["messages"][1]]}, "turn 0: content .* UTF-8"),
        ({"text": "half an emoji: \ud83d"}, "text must be text that UTF-8 can hold"),
    ],
)
def test_what_a_template_would_print_as_python_does_is_refused(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"place: .*{message}"):
        parse_record(value, "place")


def test_a_turn_that_only_calls_tools_says_nothing() -> None:
    calls = [{"id": "1", "function": {"name": "f"}}]
    asked, done = CHAT["messages"]
    for turn in (
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "tool_calls": calls},
    ):
        record = parse_record({"messages": [asked, turn, {"role": "tool", "content": "r"}, done]}, "")
        assert record.messages[1] == {"role": "assistant", "content": "", "tool_calls": calls}


def test_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "Q"}, {"type": "text", "text": "?"}]
    record = parse_record({"messages": [{"role": "user", "content": parts}, CHAT["messages"][1]]}, "")
    assert record.messages[0]["content"] == "Q?"


def test_lines_end_at_line_feeds_alone_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    odd = {"prompt": "a\u2028b\u0085c", "completion": "d"}
    text = json.dumps(odd, ensure_ascii=False) + "\r\n" + json.dumps(odd, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert [r.messages[0]["content"] for r in read_records(str(tmp_path / "a.jsonl"))] == ["a\u2028b\u0085c"] * 2


LATIN = json.dumps(CHAT).encode() + b'\n{"prompt": "caf\xe9", "completion": "A"}\n'
DAMAGED: dict[str, tuple[str, bytes, str]] = {
    "not UTF-8": ("a.jsonl", LATIN, r"a\.jsonl:2: .*UTF-8"),
    "nested without end": ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: "),
    "not gzip": ("a.jsonl.gz", b"plain", "cannot be read"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(json.dumps(CHAT).encode())[:-9], "cannot be read"),
    "not parquet": ("a.parquet", b"plain", "cannot be read"),
}


@pytest.mark.parametrize(("name", "contents", "message"), DAMAGED.values(), ids=list(DAMAGED))
def test_a_damaged_file_is_named(tmp_path: Path, name: str, contents: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(DataError, match=message):
        list(read_records(str(tmp_path / name)))


def test_the_fingerprint_of_a_folder_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "set" / "more").mkdir(parents=True)
    write(tmp_path / "set" / "a.jsonl", CHAT)
    write(tmp_path / "set" / "more" / "b.jsonl", CHAT)
    first = fingerprint(str(tmp_path / "set"))
    assert fingerprint(str(tmp_path / "set")) == first
    write(tmp_path / "set" / "more" / "b.jsonl", PAIR)
    second = fingerprint(str(tmp_path / "set"))
    (tmp_path / "set" / "more" / "b.jsonl").rename(tmp_path / "set" / "more" / "c.jsonl")
    assert len({first, second, fingerprint(str(tmp_path / "set"))}) == 3


def test_records_in_the_documents_are_read() -> None:
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    blocks = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in re.split(r"\n(?=\{)", block)]
    records = [parse_record(json.loads(line), line) for line in lines]
    assert len(records) >= 8 and len({record.form for record in records}) == 5
    assert any(record.tools for record in records)


GREETED = [{"role": role, "content": role} for role in ("system", "assistant", "user", "assistant")]


@pytest.mark.parametrize(
    ("turns", "first"),
    [(GREETED, 3), (GREETED[1:], 2), (GREETED[:2], 1), (GREETED[2:], 1), (GREETED[:1], 1), (GREETED[1:3], 2), ([], 0)],
)
def test_a_greeting_is_no_answer(turns: list[dict[str, str]], first: int) -> None:
    assert first_answer(turns) == first


def test_chats_that_begin_with_the_same_greeting_are_parted_by_what_is_asked() -> None:
    chats = [(*GREETED[:2], {"role": "user", "content": str(number)}, GREETED[3]) for number in range(2)]
    assert len({Record(place="here", messages=chat).split_key() for chat in chats}) == 2
