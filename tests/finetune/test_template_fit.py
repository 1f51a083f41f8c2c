"""Turns brought to what a template can show."""

from typing import Any

import pytest

from medusa_spec.errors import DataError
from medusa_spec.finetune.records import parse_record
from medusa_spec.finetune.template_fit import AS_TEXT, MERGED, NO_SYSTEM, NO_TOOLS, Fitted, fit
from medusa_spec.testing import tiny_tokenizer

ARGUMENTS = {"city": "Òslo", "days": 2}
CALL = {"function": {"name": "weather", "arguments": ARGUMENTS}}
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "Rain."},
]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
CALLS = {
    "tojson": "{{ c.function.name }}{{ c.function.arguments | tojson }}",
    "joins": "{{ c.function.name + c.function.arguments }}",
    "prints": "{{ c.function.name }}{{ c.function.arguments }}",
    "leaves out": "{{ c.id }}",
}


def fitted(call: str, before: str = "", **changes: Any) -> tuple[Fitted, str]:
    """What becomes of the turns, and the text that a template makes of it."""
    tokenizer = tiny_tokenizer()
    body = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %};{% endfor %}"
    tokenizer.chat_template = before + body.replace("CALL", CALLS[call])
    result = fit(parse_record({"messages": TURNS} | changes, "here:1"), tokenizer)
    return result, str(tokenizer.apply_chat_template(list(result.record.messages), tokenize=False))


JSON = '{"city": "Òslo", "days": 2}'


@pytest.mark.parametrize("call", ["tojson", "joins", "prints"])
def test_arguments_are_shown_as_json_whatever_the_template_does_with_them(call: str) -> None:
    result, text = fitted(call)
    assert text == f"Be brief.;Q;weather{JSON};rain;Rain.;"
    assert result.notes == (() if call == "tojson" else (AS_TEXT,))


@pytest.mark.parametrize("call", ["tojson", "joins"])
def test_a_refused_system_turn_is_merged_into_the_first_question(call: str) -> None:
    result, text = fitted(call, REFUSES_SYSTEM)
    assert text == f"Be brief.\n\nQ;weather{JSON};rain;Rain.;"
    assert result.notes == ((MERGED,) if call == "tojson" else (MERGED, AS_TEXT))


def test_numbers_of_answers_move_with_the_merged_turn() -> None:
    turns = [turn | {"weight": 0} if turn["content"] == "Rain." else turn for turn in TURNS]
    assert fitted("tojson", REFUSES_SYSTEM, messages=turns)[0].record.untrained == {3}


def test_a_template_without_calls_is_refused() -> None:
    with pytest.raises(DataError, match="here:1: the chat template cannot render .*call of 'weather' is left out"):
        fitted("leaves out")


def test_the_first_error_is_told_when_nothing_helps() -> None:
    with pytest.raises(DataError, match="no system"):
        fitted("tojson", REFUSES_SYSTEM + "{{ raise_exception('nor anything else') }}")


def test_what_the_template_leaves_out_is_noted() -> None:
    shows = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    calls = "{% set messages = messages[1:] %}"
    assert fitted("tojson", tools=[TOOL])[0].notes == ()  # the call names it
    other = [{"type": "function", "function": {"name": "clock"}}]
    assert fitted("tojson", tools=other)[0].notes == (NO_TOOLS,)
    assert fitted("tojson", shows, tools=other)[0].notes == ()
    assert fitted("tojson", calls, tools=other)[0].notes == (NO_TOOLS, NO_SYSTEM)


def test_turns_without_system_and_tools_are_not_touched() -> None:
    record = parse_record({"messages": TURNS[1:2] + TURNS[4:]}, "here:1")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('not asked') }}"
    assert fit(record, tokenizer) == Fitted(record=record)
