"""The forms in which records come, each brought to turns or to a text. Knows fields, no files and no tokens."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from medusa_spec.errors import DataError

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool", "developer")

SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
"""Roles under other names, as ShareGPT and the older OpenAI interface have them."""
CALLS = ("function_call", "tool_call")
"""Speakers whose words are the JSON of a tool call."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a record says.

    Attributes:
        form: Which of `FORMS` it had.
        messages: The turns; empty for plain text.
        text: The text, where there are no turns.
        tools: What the chat template is told of tools.
        untrained: Numbers of the answers that are not to be trained on: those with `weight` 0.
    """

    form: str
    messages: tuple[Message, ...] = ()
    text: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    untrained: frozenset[int] = frozenset()


def read_form(value: dict[str, Any], place: str, *, answered: bool = True) -> Content:
    """What a record says, by the first of `FORMS` that it has.

    Args:
        value: The record.
        place: File and line.
        answered: Whether it must hold an answer; otherwise `UNANSWERED` are read too.

    Raises:
        DataError: If it has none of them, or one that is not well-formed.
    """
    for form, (fields, read) in (FORMS if answered else UNANSWERED).items():
        if all(value.get(field) is not None for field in fields):
            content = read(value, form, place)
            if answered and content.text is None and all(m["role"] != "assistant" for m in content.messages):
                raise DataError(
                    f"{place}: {form} must hold an assistant turn, since heads learn from answers; got only "
                    f"{sorted({message['role'] for message in content.messages})}"
                )
            return content
    raise DataError(
        f"{place}: a record must have `messages` or `conversations`, `prompt` and `completion`, `instruction` and "
        f"`output`, or `text`; got the keys {sorted(value)}"
    )


def _turn_list(value: dict[str, Any], form: str, place: str) -> Content:
    return _chat(value[form], value, form, place)


def _pair(value: dict[str, Any], form: str, place: str) -> Content:
    turns = _as_turns(value["prompt"], "user", place)
    if value.get("completion") is not None:
        turns = turns + _as_turns(value["completion"], "assistant", place)
    return _chat(turns, value, form, place)


def _instruction(value: dict[str, Any], form: str, place: str) -> Content:
    """Alpaca's; what was said before may stand in `history`, as pairs."""
    parts = [value["instruction"], *([value["input"]] if value.get("input") else [])]
    answer = [value["output"]] if value.get("output") is not None else []
    history = value.get("history") or []
    if not isinstance(history, list) or any(not isinstance(pair, (list, tuple)) or len(pair) != 2 for pair in history):
        raise DataError(f"{place}: history must be a list of pairs of question and answer, got {history!r:.80}")
    for part in (*parts, *answer):
        if not isinstance(part, str):
            raise DataError(
                f"{place}: instruction, input and output must be texts, got {type(part).__name__}; give `messages` "
                "for anything else"
            )
    said = [turn for pair in history for turn in zip(("user", "assistant"), pair, strict=True)]
    said += [("user", "\n\n".join(parts)), *(("assistant", text) for text in answer)]
    return _chat([{"role": role, "content": text} for role, text in said], value, form, place)


def _text(value: dict[str, Any], form: str, place: str) -> Content:
    text = value["text"]
    if not isinstance(text, str):
        raise DataError(f"{place}: text must be a text, got {type(text).__name__}")
    if not text:
        raise DataError(f"{place}: text must not be empty")
    return Content(form=form, text=_checked(text, "text", place))


_Reader = Callable[[dict[str, Any], str, str], Content]
FORMS: dict[str, tuple[tuple[str, ...], _Reader]] = {
    "messages": (("messages",), _turn_list),
    "conversations": (("conversations",), _turn_list),
    "conversation": (("conversation",), _turn_list),
    "prompt and completion": (("prompt", "completion"), _pair),
    "instruction and output": (("instruction", "output"), _instruction),
    "text": (("text",), _text),
}
"""Form to the fields that tell it, and its reader. Turns come first: some data sets carry a rendered `text` as well."""

UNANSWERED = {form: FORMS[form] for form in FORMS if form != "text"} | {
    "prompt": (("prompt",), _pair),
    "instruction": (("instruction",), _instruction),
    "text": FORMS["text"],
}
"""The same, and forms without an answer."""


def _as_turns(value: Any, role: str, place: str) -> list[Any]:
    if not isinstance(value, (str, list)):
        raise DataError(f"{place}: prompt and completion must be texts or lists of turns, got {type(value).__name__}")
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _chat(turns: Any, value: dict[str, Any], form: str, place: str) -> Content:
    """Turns in whatever form, with the record's tools and system text."""
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{place}: {form} must be a non-empty list of turns, got {turns!r:.80}")
    messages = [_turn(turn, f"{place}: turn {index}") for index, turn in enumerate(turns)]
    system = value.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _checked(system, "system", place)})
    weights = [message.pop("weight", 1) for message in messages]
    untrained = [i for i, message in enumerate(messages) if message["role"] == "assistant" and weights[i] == 0]
    tools = value.get("tools") or value.get("functions")
    return Content(form=form, messages=tuple(messages), tools=_tools(tools, place), untrained=frozenset(untrained))


def _turn(turn: Any, place: str) -> Message:
    """A turn as chat templates expect it: role, content, and perhaps tool calls and what else it has."""
    if isinstance(turn, dict) and "from" in turn and "role" not in turn:  # ShareGPT
        turn = {"role": turn["from"], "content": turn.get("value")} | {
            key: turn[key] for key in turn if key not in ("from", "value")
        }
    if not isinstance(turn, dict) or "role" not in turn or not {"content", "tool_calls", "function_call"} & set(turn):
        raise DataError(f"{place} must have `role` and `content`, got {turn!r:.200}")
    role = SPEAKERS.get(str(turn["role"]), turn["role"])
    if role not in ROLES:
        raise DataError(f"{place} must have a role of {', '.join(ROLES)}, got {turn['role']!r}")
    if turn.get("weight") not in (None, 0, 1):
        raise DataError(f"{place}: weight must be 0 or 1, got {turn['weight']!r}")
    message = {key: part for key, part in turn.items() if part is not None and part != []} | {"role": role}
    if turn["role"] in CALLS:
        message |= {"content": "", "tool_calls": [_call(_object(turn.get("content"), "a tool call", place), place)]}
    else:
        message["content"] = _content(turn, place)
    if "function_call" in message:  # the older OpenAI interface
        message["tool_calls"] = [_call(message.pop("function_call"), place)]
    elif "tool_calls" in message and turn["role"] not in CALLS:
        calls = _object(message["tool_calls"], "tool_calls", place)
        if not isinstance(calls, list):
            raise DataError(f"{place}: tool_calls must be a list, got {type(calls).__name__}")
        message["tool_calls"] = [_call(call, place) for call in calls]
    return message


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


def _call(call: Any, place: str) -> dict[str, Any]:
    """A tool call with its function under `function`, and arguments that were written as JSON read."""
    if isinstance(call, dict) and "function" not in call and "name" in call:
        call = {"type": "function", "function": call}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{place}: a tool call must have a function with a name, got {call!r:.200}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except ValueError:
            read = None
        if isinstance(read, dict):  # what is no JSON object stays as it was written
            function = function | {"arguments": read}
    return call | {"function": function}


def _tools(tools: Any, place: str) -> tuple[dict[str, Any], ...]:
    if not tools:
        return ()
    found = _object(tools, "tools", place)
    if not isinstance(found, list) or any(not isinstance(tool, dict) for tool in found):
        raise DataError(f"{place}: tools must be a list of objects, or the JSON of one, got {tools!r:.80}")
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in found)


def _object(value: Any, name: str, place: str) -> Any:
    """The value, or what its JSON says."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(f"{place}: {name} must be JSON, got {value!r:.80} ({error})") from error


def _checked(text: str, name: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: {name} must be text that UTF-8 can hold ({error}); remove that character") from error
    return text
