"""From a conversation to token ids and the mask of the tokens that heads learn from. Knows templates, not files."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from medusa_spec.chat_template import chat_template_hash as chat_template_hash
from medusa_spec.errors import DataError
from medusa_spec.finetune.records import Record, first_answer
from medusa_spec.finetune.template_fit import cannot_render, fit, show

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BOUNDARY = 2
"""Tokens at the edge of a turn that may differ between two renderings because the tokenizer merged across it."""

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as the target reads it.

    Attributes:
        input_ids: The token ids.
        mask: For each token whether the target would have had to choose it: the answers, end of turn included.
        spans: Where the answers that are trained on stand, first token and the one behind the last.
        answers: How many answers there are; greetings, before anybody asked, are none.
        weightless: How many of them have `weight` 0.
        rewritten: How many the template shows differently once more has been said (thoughts removed, say): such an
            answer is not trained on, since the target never stood before those tokens.
        notes: What was changed for the template, and what it leaves out.
    """

    input_ids: list[int]
    mask: list[bool]
    spans: tuple[Span, ...] = ()
    answers: int = 1
    weightless: int = 0
    rewritten: int = 0
    notes: tuple[str, ...] = ()


def template_of(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any] = ()) -> str | None:
    """The chat template, of several the one that is taken for these tools."""
    if not isinstance(tokenizer.chat_template, dict):
        return tokenizer.chat_template
    return tokenizer.get_chat_template(tools=list(tools) or None)


def has_generation_marks(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any] = ()) -> bool:
    """Whether the chat template marks answers with `{% generation %}`."""
    return bool(_MARK.search(template_of(tokenizer, tools) or ""))


def render(record: Record, tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int]) -> Rendered:
    """Token ids and mask of a record, by generation marks if the template has them, else by prefix differencing.

    ```
    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    ·           ·   · · ·         · ·           ·        · ■    ■         ·
    ```

    Raises:
        DataError: If no token or every token of a conversation would be trained on, or the template cannot show it.
    """
    if record.text is not None:
        ids = list(tokenizer(record.text)["input_ids"])
        return Rendered(input_ids=ids, mask=[True] * len(ids), spans=((0, len(ids)),))
    fitted = fit(record, tokenizer)
    record = fitted.record
    ids, spans = _lay_out(record, tokenizer)
    spans = [_end_of_turn(ids, span, tokenizer, eos_ids) for span in spans]
    if not record.finished and spans and spans[-1][1] > spans[-1][0]:
        # A cut answer did not end: the template's end of turn was not the target's choice.
        start, end = spans[-1]
        spans[-1] = (start, end - 1 if ids[end - 1] in eos_ids else end)
    answers = len(_answers(record))
    rewritten = max(0, answers - len(spans))
    spans = _without(record, spans, tokenizer)
    mask = [False] * len(ids)
    for start, end in spans:
        mask[start:end] = [True] * (end - start)
    _check(record, mask)
    return Rendered(
        input_ids=ids,
        mask=mask,
        spans=tuple(spans),
        answers=answers,
        weightless=len(record.untrained),
        rewritten=rewritten,
        notes=fitted.notes,
    )


def _lay_out(record: Record, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[Span]]:
    """Ids, and where the answers stand in them."""
    if tokenizer.chat_template is None:
        return _plain(record, tokenizer)
    try:
        return (_marked if has_generation_marks(tokenizer, record.tools) else _differenced)(record, tokenizer)
    except Exception as error:  # a template is a program, and may fail in any way
        raise cannot_render(record, error) from error


def _without(record: Record, spans: list[Span], tokenizer: PreTrainedTokenizerBase) -> list[Span]:
    """The spans without those of answers that are not to be trained on."""
    if not record.untrained:
        return spans
    if tokenizer.chat_template is None:  # prompt and completion
        return []
    places = [_place(record, number, tokenizer) for number in sorted(record.untrained)]
    if None in places and has_generation_marks(tokenizer, record.tools):
        raise DataError(
            f"{record.place}: weight 0 cannot be kept to: the chat template does not show that answer in one place; "
            "leave the record out, or the weight"
        )
    return [(a, b) for a, b in spans if not any(place and a < place[1] and place[0] < b for place in places)]


def _check(record: Record, mask: list[bool]) -> None:
    if not any(mask):
        raise DataError(
            f"{record.place}: no token would be trained on; the assistant turns are empty, or the chat template "
            "does not render them as a continuation of what stands before them"
        )
    if all(mask):
        raise DataError(
            f"{record.place}: every token would be trained on, prompt included; the chat template's "
            "{% generation %} marks enclose the whole conversation, or there is no prompt"
        )


def _plain(record: Record, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[Span]]:
    """Without a template only prompt + completion can be laid out: the texts one after the other, then EOS."""
    messages = record.messages
    if len(messages) != 2 or messages[0]["role"] != "user":
        raise DataError(
            f"{record.place}: the tokenizer must have a chat template to lay out `messages`, but it has none; use "
            "`prompt` and `completion`, or `text`, or set tokenizer.chat_template"
        )
    before = list(tokenizer(messages[0]["content"])["input_ids"])
    ids = list(tokenizer(messages[0]["content"] + messages[1]["content"])["input_ids"])
    start = _common(before, ids)
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    return ids, [(start, len(ids))]


def _marked(record: Record, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[Span]]:
    told: Any = list(record.tools) or None
    encoded: Any = tokenizer.apply_chat_template(
        list(record.messages), tools=told, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids = list(encoded["input_ids"])
    marks = [*map(bool, encoded["assistant_masks"]), False]
    edges = [i for i, mark in enumerate(marks) if mark != (marks[i - 1] if i else False)]
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    greetings = sum(message["role"] == "assistant" for message in record.messages) - len(_answers(record))
    return ids, spans[greetings:]


def _differenced(record: Record, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[Span]]:
    ids = _ids(record, tokenizer)
    places = [_place(record, number, tokenizer, ids) for number in _answers(record)]
    return ids, [place for place in places if place is not None]


def _answers(record: Record) -> list[int]:
    """Numbers of the turns that answer; greetings do not."""
    first = first_answer(record.messages)
    return [number for number in range(first, len(record.messages)) if record.messages[number]["role"] == "assistant"]


def _place(
    record: Record, number: int, tokenizer: PreTrainedTokenizerBase, ids: list[int] | None = None
) -> Span | None:
    """Where an answer stands: between what stands before it and what stands before and with it.

    None if the template does not show it so in the end, or nothing stands before it.
    """
    if number == 0:
        return None
    ids = _ids(record, tokenizer) if ids is None else ids
    before = _ids(record, tokenizer, number, add_generation_prompt=True)
    through = ids if number + 1 == len(record.messages) else _ids(record, tokenizer, number + 1)
    start, end = _common(before, ids), _common(through, ids)
    # Some templates render earlier turns differently later on (thoughts removed): such a turn is left out.
    if start >= len(before) - _BOUNDARY and end >= len(through) - _BOUNDARY and start < end:
        return start, end
    return None


def _ids(record: Record, tokenizer: PreTrainedTokenizerBase, count: int | None = None, **kwargs: Any) -> list[int]:
    """Ids of the first `count` turns."""
    text = show(record.messages[:count], tokenizer, record.tools, **kwargs)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


def _end_of_turn(ids: list[int], span: Span, tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int]) -> Span:
    """The span up to and including the end-of-turn token.

    Generation stops there: what a template puts after it (a line break, a second end token) is never chosen by the
    target. Marks that end just before it are widened by it.
    """
    start, end = span
    if end < len(ids) and ids[end] in eos_ids and not (end > start and ids[end - 1] in eos_ids):
        return start, end + 1
    ends = [i for i in range(start, end) if ids[i] in eos_ids]
    for last in (ends[0], ends[-1]) if ends else ():  # text behind an end token is the answer's own
        rest = [token for token in ids[last + 1 : end] if token not in eos_ids]
        if not str(tokenizer.decode(rest)).strip():
            return start, last + 1
    return span
