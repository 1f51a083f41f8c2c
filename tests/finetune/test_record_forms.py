"""Every form of record says the same."""

import json
from typing import Any

import pytest

from medusa_spec.errors import DataError
from medusa_spec.finetune.record_forms import FORMS, read_form

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TURNS = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "R"},
    {"role": "assistant", "content": "B"},
]
SHAREGPT = [
    {"from": "system", "value": "S"},
    {"from": "human", "value": "Q"},
    {"from": "gpt", "value": "A"},
    {"from": "user", "value": "R"},
    {"from": "assistant", "value": "B"},
]
SAME: dict[str, dict[str, Any]] = {
    "messages": {"messages": TURNS},
    "ShareGPT": {"conversations": SHAREGPT, "id": "1"},
    "ShareGPT in messages": {"messages": SHAREGPT},
    "roles in conversations": {"conversations": TURNS},
    "conversation": {"conversation": TURNS, "language": "English"},
    "system beside": {"system": "S", "conversations": SHAREGPT[1:]},
    "turns and text": {"prompt": TURNS[:4], "completion": "B"},
    "turns and turns": {"prompt": TURNS[:4], "completion": TURNS[4:]},
    "Alpaca": {"system": "S", "instruction": "R", "input": "", "output": "B", "history": [["Q", "A"]]},
    "a rendered text beside": {"messages": TURNS, "text": "S Q A R B", "prompt": "Q"},
}


@pytest.mark.parametrize("record", SAME.values(), ids=list(SAME))
def test_the_same_conversation_is_the_same_in_every_form(record: dict[str, Any]) -> None:
    content = read_form(record, "here")
    assert list(content.messages) == TURNS and content.text is None and content.form in FORMS


def test_an_instruction_with_an_input_is_one_question() -> None:
    content = read_form({"instruction": "Add.", "input": "1 2", "output": "3", "text": "### Instruction: …"}, "here")
    assert [m["content"] for m in content.messages] == ["Add.\n\n1 2", "3"]
    assert content.form == "instruction and output"


CALLED = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
CALLED += [{"role": "tool", "content": "rain"}, {"role": "assistant", "content": "Rain."}]


def answered(turn: dict[str, Any], result: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    return [CALLED[0], turn, result or CALLED[2], CALLED[3]]


TEXT = json.dumps(CALL["function"]["arguments"])
CALLS: dict[str, list[dict[str, Any]]] = {
    "standard": CALLED,
    "arguments as JSON": answered(
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": TEXT}}],
        }
    ),
    "bare": answered({"role": "assistant", "content": "", "tool_calls": [CALL["function"]]}),
    "calls as JSON": answered({"role": "assistant", "tool_calls": json.dumps([CALL["function"]])}),
    "function_call": answered({"role": "assistant", "function_call": {"name": "weather", "arguments": TEXT}}),
    "ShareGPT": [
        {"from": "human", "value": "Q"},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "Rain."},
    ],
    "a tool's result as a function's": answered(CALLED[1], {"role": "function", "content": "rain"}),
    "nulls of other turns": [{**turn, "name": None, "weight": None} for turn in CALLED],
}


@pytest.mark.parametrize("turns", CALLS.values(), ids=list(CALLS))
def test_the_same_call_is_the_same_however_it_is_written(turns: list[dict[str, Any]]) -> None:
    assert list(read_form({"messages": turns}, "here").messages) == CALLED


@pytest.mark.parametrize(
    "tools", [[TOOL], json.dumps([TOOL]), [TOOL["function"]], json.dumps([TOOL["function"]])], ids=repr
)
def test_tools_are_read_however_they_are_written(tools: Any) -> None:
    assert read_form({"messages": CALLED, "tools": tools}, "here").tools == (TOOL,)
    assert read_form({"messages": CALLED, "functions": tools}, "here").tools == (TOOL,)
    assert read_form({"messages": CALLED, "tools": ""}, "here").tools == ()


def test_arguments_that_are_no_json_object_stay_as_they_were_written() -> None:
    call = {"type": "function", "function": {"name": "run", "arguments": "print('hi')"}}
    assert read_form({"messages": answered({"role": "assistant", "tool_calls": [call]})}, "here").messages[1][
        "tool_calls"
    ] == [call]


def test_what_else_a_turn_has_is_handed_on() -> None:
    turn = {"role": "assistant", "content": "A", "reasoning_content": "hm", "name": "bob"}
    assert read_form({"messages": [TURNS[1], turn]}, "here").messages[1] == turn


def test_answers_of_weight_nought_are_noted_and_the_weight_is_not_handed_on() -> None:
    turns = [{**turn, "weight": weight} for turn, weight in zip(TURNS, (0, 1, 0, 0, 1.0), strict=True)]
    content = read_form({"messages": turns}, "here")
    assert content.untrained == {2} and list(content.messages) == TURNS
    shifted = read_form({"system": "S", "messages": turns[1:]}, "here")
    assert shifted.untrained == {2} and list(shifted.messages) == TURNS


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown speaker": ({"conversations": [{"from": "narrator", "value": "x"}]}, "turn 0 must have a role.*'narrator'"),
    "nobody answers": ({"conversations": SHAREGPT[:2]}, "conversations must hold an assistant turn"),
    "no turns": ({"conversations": []}, "conversations must be a non-empty list"),
    "a call that is no JSON": (
        {"conversations": [SHAREGPT[1], {"from": "function_call", "value": "weather(Oslo)"}]},
        r"turn 1: a tool call must be JSON, got 'weather\(Oslo\)'",
    ),
    "a call without a name": (
        {"messages": answered({"role": "assistant", "tool_calls": [{"arguments": {}}]})},
        "turn 1: a tool call must have a function with a name",
    ),
    "calls that are no list": (
        {"messages": answered({"role": "assistant", "tool_calls": {"name": "f"}})},
        "turn 1: tool_calls must be a list, got dict",
    ),
    "a half weight": ({"messages": [TURNS[1], {**TURNS[2], "weight": 0.5}]}, "turn 1: weight must be 0 or 1, got 0.5"),
    "tools that are no list": ({"messages": TURNS, "tools": "weather"}, "tools must be JSON"),
    "tools that are texts": ({"messages": TURNS, "tools": ["weather"]}, "tools must be a list of objects"),
    "an output that is a list": ({"instruction": "Q", "output": ["A"]}, "instruction, input and output must be texts"),
    "history of texts": ({"instruction": "Q", "output": "A", "history": ["Q"]}, "history must be a list of pairs"),
    "a text that is a number": ({"text": 5}, "text must be a text, got int"),
}


@pytest.mark.parametrize(("record", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_read_is_refused_by_name(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^here: .*{message}"):
        read_form(record, "here")
