"""Conversations as they lie in files and data sets. Knows what a record says, no tokens."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_spec.errors import DataError
from medusa_spec.finetune.record_files import DataName, read_values
from medusa_spec.finetune.record_forms import ROLES as ROLES
from medusa_spec.finetune.record_forms import Message as Message
from medusa_spec.finetune.record_forms import read_form


@dataclass(frozen=True, kw_only=True)
class Record:
    """One conversation or text.

    Attributes:
        place: File and line, for error messages.
        messages: The turns; empty for plain text.
        text: The text, where there are no turns.
        tools: What the chat template is told of tools.
        untrained: Numbers of the answers that are not to be trained on.
        form: The form in which it lay in its file; see `record_forms.FORMS`.
        source: The record's `source` field.
        finished: False where the last answer was cut off, so that its end was not chosen by the model.
        license: The record's `license` (or `licence`) field.
    """

    place: str
    messages: tuple[Message, ...] = ()
    text: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    untrained: frozenset[int] = frozenset()
    form: str = ""
    source: str | None = None
    finished: bool = True
    license: str | None = None

    def split_key(self) -> str:
        """Hash of what stands before the first answer: two answers to one prompt must not be parted."""
        head: list[Any] = [self.text]
        asked = self.messages[: first_answer(self.messages)]
        head += [[message["role"], message["content"]] for message in asked]
        return hashlib.sha256(json.dumps(head, ensure_ascii=False).encode()).hexdigest()


def first_answer(messages: Sequence[Message]) -> int:
    """Number of the turn that answers first; an assistant's before anybody asked is a greeting, and none.

    ```
    system user ASSISTANT        system assistant user ASSISTANT        system ASSISTANT (nobody asks: it answers that)
    ```

    Returns:
        That number; how many turns there are, if none answers.
    """
    asked = (place for place, turn in enumerate(messages) if turn["role"] not in ("assistant", "system", "developer"))
    answers = (place for place, turn in enumerate(messages) if turn["role"] == "assistant")
    first = next(asked, 0)
    return next((place for place in answers if place >= first), len(messages))


def read_records(
    name: str, *, answered: bool = True, limit: int | None = None, unusable: list[DataError] | None = None
) -> Iterator[Record]:
    """Records of a file, a folder or a hub data set; see `record_files.read_values`.

    Args:
        name: The input.
        answered: Whether a record must hold an answer.
        limit: Read the first so many.
        unusable: Takes the errors of records that cannot be used, which are then left out; None raises them.

    Raises:
        DataError: If there is no such file, it is empty or damaged, or a record cannot be used; the line is named.
    """
    found = False
    for place, value in read_values(name, limit):
        found = True
        try:
            record = parse_record(value, place, answered=answered)
        except DataError as error:
            if unusable is None:
                raise
            unusable.append(error)
            continue
        yield record
    if not found:
        raise DataError(f"data {name!r} must hold at least one record, but it is empty")


def select(
    names: Iterable[str],
    sources: tuple[str, ...] | None,
    *,
    answered: bool = True,
    limit: int | None = None,
    unusable: list[DataError] | None = None,
) -> Iterator[Record]:
    """The records of all inputs whose `source` is among `sources`.

    Args:
        names: Files and data sets.
        sources: None takes all.
        answered: Whether a record must hold an answer.
        limit: Read the first so many of each input.
        unusable: As in `read_records`.

    Raises:
        DataError: If none is left.
    """
    seen: Counter[str | None] = Counter()
    kept = 0
    for name in names:
        for record in read_records(name, answered=answered, limit=limit, unusable=unusable):
            seen[record.source] += 1
            if sources is None or record.source in sources:
                kept += 1
                yield record
    if not seen and unusable:
        raise unusable[0]
    if not kept:
        raise DataError(f"sources must name at least one source of the data: {dict(seen)}, got {sources}")


def fingerprint(name: str) -> str:
    """Hash of the contents of a file, or of all files of a folder, and of its split; for a hub data set its name, which
    is all one has without loading it."""
    wanted = DataName.parse(name)
    path = Path(wanted.name)
    if not path.exists():
        return f"dataset:{name}"
    digest = hashlib.sha256()
    for part in [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file()):
        digest.update(str(part.relative_to(path)).encode() if part != path else b"")
        with part.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:32] + name[len(wanted.name) :]


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
    source = _optional_text(value, "source", place)
    given = _optional_text(value, "license", place) or _optional_text(value, "licence", place)
    content = read_form(value, place, answered=answered)
    return Record(
        place=place,
        messages=content.messages,
        text=content.text,
        tools=content.tools,
        untrained=content.untrained,
        form=content.form,
        source=source,
        finished=value.get("finished") is not False,
        license=given,
    )


def _optional_text(value: dict[str, Any], key: str, place: str) -> str | None:
    text = value.get(key)
    if text is not None and not isinstance(text, str):
        raise DataError(f"{place}: {key} must be a string, got {type(text).__name__}")
    return text
