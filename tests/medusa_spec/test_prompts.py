import json
from pathlib import Path
from typing import Any

import pytest

from medusa_spec.errors import DataError
from medusa_spec.prompts import Prompt, as_prompt, encode, packaged_prompts, read_prompts
from medusa_spec.testing import tiny_tokenizer


def _write(folder: Path, records: list[Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return path


def test_prompt_turns_and_messages_are_read(tmp_path: Path) -> None:
    talk = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]
    path = _write(
        tmp_path,
        [
            {"prompt": "One"},
            {"turns": ["Two", "and then?"], "category": "chat", "id": 7},
            {"messages": talk, "id": "last"},
        ],
    )
    by_name = {prompt.name: prompt for prompt in read_prompts(path)}
    one, two, three = by_name["1"], by_name["7"], by_name["last"]
    assert one.messages == ({"role": "user", "content": "One"},)
    assert two.later_turns == ("and then?",) and two.category == "chat"
    assert [message["content"] for message in three.messages] == ["Be kind.", "Hi"]


def test_limit_takes_from_all_categories_in_turn(tmp_path: Path) -> None:
    path = _write(tmp_path, [{"prompt": f"{kind}{n}", "category": kind} for kind in "abc" for n in range(3)])
    taken = [prompt.messages[0]["content"] for prompt in read_prompts(path, limit=5)]
    assert taken == ["a0", "b0", "c0", "a1", "b1"]
    taken = [prompt.messages[0]["content"] for prompt in read_prompts(path, per_category=2)]
    assert taken == ["a0", "b0", "c0", "a1", "b1", "c1"]


@pytest.mark.parametrize(
    "record", [{"text": "x"}, {"prompt": ""}, {"turns": []}, {"messages": [{"role": "user"}]}, [1]]
)
def test_unusable_line_is_named_by_number(tmp_path: Path, record: Any) -> None:
    with pytest.raises(DataError, match="line 2"):
        read_prompts(_write(tmp_path, [{"prompt": "good"}, record]))


def test_line_that_is_not_json_is_named_by_number(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good"}\n\n{"prompt": ')
    with pytest.raises(DataError, match="line 3"):
        read_prompts(path)


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file"):
        read_prompts(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="empty"):
        read_prompts(tmp_path / "empty.jsonl")


def test_packaged_prompts_can_be_read_and_have_categories() -> None:
    prompts = read_prompts(packaged_prompts())
    assert len(prompts) == len({prompt.name for prompt in prompts})
    assert len({prompt.category for prompt in prompts}) > 1
    assert all(prompt.category for prompt in prompts)


def test_text_messages_and_prompt_mean_the_same() -> None:
    message = {"role": "user", "content": "Hi"}
    assert as_prompt("Hi") == as_prompt([message]) == as_prompt(Prompt(messages=(message,)))
    kept = as_prompt(Prompt(messages=(message,), later_turns=("b",), name="n"), "chat")
    assert (kept.category, kept.later_turns, kept.name) == ("chat", ("b",), "n")


def test_encoding_goes_through_the_chat_template_only_if_wanted() -> None:
    tokenizer = tiny_tokenizer()
    messages = as_prompt("Hi").messages
    chat = encode(tokenizer, messages)
    assert tokenizer.decode(chat["input_ids"][0]).endswith("Hi<|im_end|>\n<|im_start|>assistant\n")
    plain = encode(tokenizer, messages, chat_template=False)
    assert tokenizer.decode(plain["input_ids"][0]) == "Hi"
    assert plain["attention_mask"].tolist() == [[1, 1]]
    tokenizer.chat_template = None
    assert encode(tokenizer, messages)["input_ids"].tolist() == plain["input_ids"].tolist()


def test_empty_text_is_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        encode(tiny_tokenizer(), as_prompt("").messages, chat_template=False)


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    odd = "a\u2028b\u0085c"
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + (json.dumps({"prompt": odd}, ensure_ascii=False) + "\r\n").encode() * 2)
    assert [prompt.messages[0]["content"] for prompt in read_prompts(path)] == [odd, odd]


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(DataError, match="UTF-8"):
        read_prompts(tmp_path / "prompts.jsonl")
