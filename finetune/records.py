"""Conversations as they lie in files and data sets. Knows fields and lines, no tokens."""

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_spec.errors import DataError

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool", "developer")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One conversation or text.

    Attributes:
        place: File and line, for error messages.
        messages: The turns; empty for plain text.
        text: The text, where there are no turns.
        source: The record's `source` field.
        finished: False where the last answer was cut off, so that its end was not chosen by the model.
        license: The record's `license` (or `licence`) field.
    """

    place: str
    messages: tuple[Message, ...] = ()
    text: str | None = None
    source: str | None = None
    finished: bool = True
    license: str | None = None

    def split_key(self) -> str:
        """Hash of what stands before the first answer: two answers to one prompt must not be parted."""
        head: list[Any] = [self.text]
        for message in self.messages:
            if message["role"] == "assistant":
                break
            head.append([message["role"], message["content"]])
        return hashlib.sha256(json.dumps(head, ensure_ascii=False).encode()).hexdigest()


def read_records(name: str, *, answered: bool = True) -> Iterator[Record]:
    """Records of a file (`.jsonl`, `.json` with one record a line, `.gz` of them, `.parquet`) or a hub data set.

    Raises:
        DataError: If there is no such file, it is empty, or a record cannot be used; the line is named.
    """
    path = Path(name)
    found = False
    for place, value in _lines(path) if path.is_file() else _data_set(name):
        found = True
        yield parse_record(value, place, answered=answered)
    if not found:
        raise DataError(f"data {name!r} must hold at least one record, but it is empty")


def select(names: Iterable[str], sources: tuple[str, ...] | None, *, answered: bool = True) -> Iterator[Record]:
    """The records of all inputs whose `source` is among `sources`.

    Args:
        names: Files and data sets.
        sources: None takes all.
        answered: Whether a record must hold an answer.

    Raises:
        DataError: If none is left.
    """
    seen: Counter[str | None] = Counter()
    kept = 0
    for name in names:
        for record in read_records(name, answered=answered):
            seen[record.source] += 1
            if sources is None or record.source in sources:
                kept += 1
                yield record
    if not kept:
        raise DataError(f"sources must name at least one source of the data: {dict(seen)}, got {sources}")


def fingerprint(name: str) -> str:
    """Hash of the contents of a file, or of all files of a folder; for a hub data set its name, which is all one has
    without loading it."""
    path = Path(name)
    if not path.exists():
        return f"dataset:{name}"
    digest = hashlib.sha256()
    for part in [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file()):
        digest.update(str(part.relative_to(path)).encode() if part != path else b"")
        with part.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:32]


def parse_record(value: Any, place: str, *, answered: bool = True) -> Record:
    """A record from its parsed JSON.

    Args:
        value: The JSON.
        place: File and line.
        answered: Whether it must hold an answer; otherwise a prompt is enough.

    Raises:
        DataError: If it has none of the known forms, or a turn lacks role or content.
    """
    if not isinstance(value, dict):
        raise DataError(f"{place}: a record must be a JSON object, got {type(value).__name__}")
    common: dict[str, Any] = {
        "place": place,
        "source": _optional_text(value, "source", place),
        "finished": value.get("finished") is not False,
        "license": _optional_text(value, "license", place) or _optional_text(value, "licence", place),
    }
    if value.get("messages") is not None:
        return Record(messages=_messages(value["messages"], place, answered), **common)
    if value.get("prompt") is not None and value.get("completion") is not None:
        turns = _as_turns(value["prompt"], "user", place) + _as_turns(value["completion"], "assistant", place)
        return Record(messages=_messages(turns, place, answered), **common)
    if value.get("prompt") is not None and not answered:
        return Record(messages=_messages(_as_turns(value["prompt"], "user", place), place, answered), **common)
    if isinstance(value.get("text"), str):
        if not value["text"]:
            raise DataError(f"{place}: text must not be empty")
        return Record(text=_checked(value["text"], "text", place), **common)
    raise DataError(
        f"{place}: a record must have `messages`, `prompt` and `completion`, or `text`; got the keys {sorted(value)}"
    )


def _optional_text(value: dict[str, Any], key: str, place: str) -> str | None:
    text = value.get(key)
    if text is not None and not isinstance(text, str):
        raise DataError(f"{place}: {key} must be a string, got {type(text).__name__}")
    return text


def _as_turns(value: Any, role: str, place: str) -> list[Any]:
    if not isinstance(value, (str, list)):
        raise DataError(f"{place}: prompt and completion must be texts or lists of turns, got {type(value).__name__}")
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _messages(turns: Any, place: str, answered: bool) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{place}: messages must be a non-empty list of turns, got {turns!r}")
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict) or "role" not in turn or not {"content", "tool_calls"} & set(turn):
            raise DataError(f"{place}: turn {index} must have `role` and `content`, got {turn!r}")
        if turn["role"] not in ROLES:
            raise DataError(f"{place}: turn {index} must have a role of {', '.join(ROLES)}, got {turn['role']!r}")
    if answered and all(turn["role"] != "assistant" for turn in turns):
        raise DataError(
            f"{place}: messages must hold an assistant turn, since heads learn from answers; got only "
            f"{sorted({turn['role'] for turn in turns})}"
        )
    return tuple({**turn, "content": _content(turn, f"{place}: turn {index}")} for index, turn in enumerate(turns))


def _content(turn: Message, place: str) -> str:
    """The words of a turn: templates would print None or a list of parts as Python does, and heads would learn that."""
    content = turn.get("content")
    if content is None:  # the turn only calls tools
        return ""
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise DataError(f"{place}: content must be a text or a list of parts with `text`, got {content!r:.80}")
    return _checked(content, "content", place)


def _checked(text: str, name: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: {name} must be text that UTF-8 can hold ({error}); remove that character") from error
    return text


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    opened = gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    number = 0
    with opened as file:
        while line := _next_line(path, file):
            number += 1
            if not line.strip():
                continue
            try:
                yield f"{path}:{number}", json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
                raise DataError(
                    f"{path}:{number}: a line must be one JSON object in UTF-8, got {line[:60]!r} ({error})"
                ) from error


def _next_line(path: Path, file: Any) -> bytes:
    try:
        return file.readline()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; restore the file") from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet  # comes with `datasets`

    row = 0
    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}; restore the file") from error
    for batch in batches:
        for value in batch.to_pylist():
            row += 1
            yield f"{path}:{row}", value


def _data_set(name: str) -> Iterator[tuple[str, Any]]:
    if name.endswith((".jsonl", ".json", ".gz", ".parquet")):
        raise DataError(f"data must name a file that is there or a hub data set, but there is no file {name!r}")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            f"data {name!r} is no file; to read it as a hub data set, pip install medusa-spec[finetune]"
        ) from error
    repo, _, split = name.partition(":")
    try:
        loaded = load_dataset(repo, split=split or "train")
    except Exception as error:
        raise DataError(f"data {name!r} is neither a file nor a data set that can be loaded: {error}") from error
    for row, value in enumerate(loaded, start=1):
        yield f"{name}:{row}", value
