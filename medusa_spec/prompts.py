"""Prompts to decode: read from JSON lines and turned into token ids. Knows no model."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from medusa_spec.errors import DataError

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One conversation to continue.

    Attributes:
        messages: What is there at the start; the last message is the user's.
        later_turns: What the user says after each answer.
        category: Kind of task, for figures by category.
        name: The record's id, or its number.
        tools: What the chat template is told of tools.
        raw: Whether the text goes on as it is, without a chat template.
    """

    messages: tuple[Message, ...]
    later_turns: tuple[str, ...] = ()
    category: str = ""
    name: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    raw: bool = False


def packaged_prompts() -> Path:
    """The prompt set that comes with the package."""
    return Path(str(files("medusa_spec") / "data" / "prompts.jsonl"))


def read_prompts(path: str | Path, *, limit: int | None = None, per_category: int | None = None) -> list[Prompt]:
    """Read JSON lines that have `prompt`, `turns` or `messages`, and perhaps `id`, `category`.

    Args:
        path: The file.
        limit: Keep the first so many; they are taken in turn from all categories.
        per_category: Keep at most so many of each category.

    Raises:
        DataError: If the file is missing or empty, or a line cannot be used (it is numbered).
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"prompts: expected a JSON-lines file, found no file {path}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON may hold other separators of lines as they are
    except UnicodeDecodeError as error:
        raise DataError(f"prompts: expected a file in UTF-8, {path} is none: {error}") from error
    prompts = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise DataError(f"prompts: expected at least one line, {path} is empty")
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    return _in_turn(list(by_category.values()), per_category)[:limit]


def as_prompt(item: str | Sequence[Message] | Prompt, category: str | None = None) -> Prompt:
    """A Prompt of a plain string, of a list of messages, or of a Prompt."""
    if isinstance(item, str):
        item = ({"role": "user", "content": item},)
    if not isinstance(item, Prompt):
        item = Prompt(messages=tuple(item))
    if category is None:
        return item
    return replace(item, category=category)


def encode(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    chat_template: bool = True,
    tools: Sequence[dict[str, Any]] = (),
) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` [1, T], by the chat template if wanted and there."""
    if chat_template and tokenizer.chat_template:
        told: Any = list(tools) or None
        encoded: Any = tokenizer.apply_chat_template(
            list(messages), tools=told, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        text = "\n\n".join(message["content"] for message in messages)
        encoded = tokenizer(text, return_tensors="pt")
    ids = encoded["input_ids"]
    if ids.shape[-1] == 0:
        raise DataError("prompt: expected at least one token, got an empty text; write a prompt")
    return {"input_ids": ids, "attention_mask": encoded["attention_mask"]}


def _parse(path: Path, number: int, line: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {number}: expected JSON, got {line[:60]!r}") from error
    messages, later = _conversation(record, f"{path}, line {number}")
    return Prompt(
        messages=messages,
        later_turns=later,
        category=str(record.get("category", "")),
        name=str(record.get("id", number)),
    )


def _conversation(record: Any, place: str) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """Opening messages and later turns of a record."""
    if not isinstance(record, dict):
        raise DataError(f"{place}: expected an object, got {type(record).__name__}")
    if isinstance(record.get("prompt"), str) and record["prompt"]:
        return as_prompt(record["prompt"]).messages, ()
    turns = record.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return as_prompt(turns[0]).messages, tuple(turns[1:])
    messages = record.get("messages")
    if isinstance(messages, list) and all(_is_message(message) for message in messages):
        # Only what comes before the last answer is a prompt.
        users = [place for place, message in enumerate(messages) if message["role"] == "user"]
        if users:
            return tuple(messages[: users[-1] + 1]), ()
    raise DataError(
        f"{place}: expected `prompt` (text), `turns` (list of texts) or `messages` "
        f"(role and content, one of them the user's), got the keys {sorted(record)}"
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _in_turn(groups: Iterable[list[Prompt]], most: int | None) -> list[Prompt]:
    """First of every group, then second of every group, and so on; at most `most` of each."""
    columns = [group[:most] for group in groups]
    longest = max(len(column) for column in columns)
    return [column[row] for row in range(longest) for column in columns if row < len(column)]
