"""Brings turns to what a chat template can show. Knows texts, no tokens and no masks."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from medusa_spec.errors import DataError
from medusa_spec.finetune.record_forms import Message
from medusa_spec.finetune.records import Record

MERGED = "system turn merged into the first user turn"
AS_TEXT = "tool arguments given to the template as JSON text"
NO_TOOLS = "tools that the template does not show"
NO_SYSTEM = "system turn that the template does not show"


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A record that the template shows.

    Attributes:
        record: The record, perhaps changed.
        notes: What was changed, and what the template leaves out.
    """

    record: Record
    notes: tuple[str, ...] = ()


def fit(record: Record, tokenizer: PreTrainedTokenizerBase) -> Fitted:
    """The record as this template can show it: unchanged if it can be, else with the least change that helps.

    ```
    system, user, assistant     the template refuses system turns: user (system + user), assistant
    arguments {"city": "Oslo"}  the template joins strings:        arguments '{"city": "Oslo"}'
    ```

    Raises:
        DataError: If no change helps, or the template leaves out tool calls: heads would learn to say nothing.
    """
    risky = record.tools or any(m["role"] == "system" or m.get("tool_calls") for m in record.messages)
    if tokenizer.chat_template is None or not risky:
        return Fitted(record=record)
    first: Exception | None = None
    for notes, changed in _variants(record):
        try:
            text = show(changed.messages, tokenizer, changed.tools)
            _check_calls(changed.messages, text)
        except Exception as error:  # a template is a program, and may fail in any way
            first = first or error
            continue
        return Fitted(record=changed, notes=(*notes, *_left_out(changed, text)))
    assert first is not None
    raise cannot_render(record, first) from first


def show(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any] = (), **kwargs: Any
) -> str:
    """The text that the template makes of turns and tools."""
    told: Any = list(tools) or None
    return str(tokenizer.apply_chat_template(list(messages), tools=told, tokenize=False, **kwargs))


def cannot_render(record: Record, error: Exception) -> DataError:
    """The error for a record at which the template fails."""
    return DataError(
        f"{record.place}: the chat template cannot render this conversation ({type(error).__name__}: {error}); "
        "leave it out, or change it or the template"
    )


def _variants(record: Record) -> Iterator[tuple[tuple[str, ...], Record]]:
    """The record, and what may be made of it, the least change first."""
    yield (), record
    texts, merged = _with_arguments_as_text(record), _with_system_merged(record)
    if texts is not None:
        yield (AS_TEXT,), texts
    if merged is not None:
        yield (MERGED,), merged
        both = _with_arguments_as_text(merged)
        if both is not None:
            yield (MERGED, AS_TEXT), both


def _with_arguments_as_text(record: Record) -> Record | None:
    changed = tuple(
        message | {"tool_calls": [_call_as_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in record.messages
    )
    return None if changed == record.messages else replace(record, messages=changed)


def _call_as_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, dict):
        return call
    return call | {"function": call["function"] | {"arguments": json.dumps(arguments, ensure_ascii=False)}}


def _with_system_merged(record: Record) -> Record | None:
    """The system's words before the first user turn's; answers keep their turns, whose numbers fall by one."""
    messages = record.messages
    if len(messages) < 2 or (messages[0]["role"], messages[1]["role"]) != ("system", "user"):
        return None
    user = messages[1] | {"content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
    untrained = frozenset(number - 1 for number in record.untrained)
    return replace(record, messages=(user, *messages[2:]), untrained=untrained)


def _check_calls(messages: Sequence[Message], text: str) -> None:
    """Every call stands in the text, with its arguments as JSON rather than as Python shows a dict."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"].get("arguments")
            if name not in text:
                raise ValueError(f"the call of {name!r} is left out")
            if isinstance(arguments, dict) and arguments and str(arguments) in text:
                if str(arguments) != json.dumps(arguments, ensure_ascii=False):
                    raise ValueError(f"the arguments of {name!r} are shown as Python shows a dict")


def _left_out(record: Record, text: str) -> tuple[str, ...]:
    names = [tool["function"].get("name") for tool in record.tools if isinstance(tool["function"], dict)]
    notes = [NO_TOOLS] if any(isinstance(name, str) and name not in text for name in names) else []
    system = record.messages[0]["content"].strip() if record.messages[0]["role"] == "system" else ""
    return (*notes, *([NO_SYSTEM] if system not in text else []))
