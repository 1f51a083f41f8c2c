"""From a conversation to token ids and the mask of the tokens that heads learn from. Knows templates, not files."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from medusa_spec.errors import DataError
from medusa_spec.finetune.records import Message, Record

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BOUNDARY = 2
"""Tokens at the edge of a turn that may differ between two renderings because the tokenizer merged across it."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as the target reads it.

    Attributes:
        input_ids: The token ids.
        mask: For each token whether the target would have had to choose it: the answers, end of turn included.
    """

    input_ids: list[int]
    mask: list[bool]


def chat_template_hash(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """First 16 hex digits of the SHA-256 of the chat template; None without a template."""
    template = tokenizer.chat_template
    return None if template is None else hashlib.sha256(str(template).encode()).hexdigest()[:16]


def has_generation_marks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template marks answers with `{% generation %}`."""
    return isinstance(tokenizer.chat_template, str) and bool(_MARK.search(tokenizer.chat_template))


def render(record: Record, tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int]) -> Rendered:
    """Token ids and mask of a record, by generation marks if the template has them, else by prefix differencing.

    ```
    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    ·           ·   · · ·         · ·           ·        · ■    ■         ·
    ```

    Raises:
        DataError: If no token or every token of a conversation would be trained on.
    """
    if record.text is not None:
        ids = list(tokenizer(record.text)["input_ids"])
        return Rendered(input_ids=ids, mask=[True] * len(ids))
    ids, spans = _lay_out(record, tokenizer)
    spans = [_end_of_turn(ids, span, tokenizer, eos_ids) for span in spans]
    if not record.finished and spans and spans[-1][1] > spans[-1][0]:
        # A cut answer did not end: the template's end of turn was not the target's choice.
        start, end = spans[-1]
        spans[-1] = (start, end - 1 if ids[end - 1] in eos_ids else end)
    mask = [False] * len(ids)
    for start, end in spans:
        mask[start:end] = [True] * (end - start)
    _check(record, mask)
    return Rendered(input_ids=ids, mask=mask)


def _lay_out(record: Record, tokenizer: PreTrainedTokenizerBase) -> "tuple[list[int], list[Span]]":
    """Ids, and where the answers stand in them."""
    if tokenizer.chat_template is None:
        return _plain(record, tokenizer)
    try:
        return (_marked if has_generation_marks(tokenizer) else _differenced)(record.messages, tokenizer)
    except Exception as error:  # a template is a program, and may fail in any way
        raise DataError(
            f"{record.place}: the chat template cannot render this conversation ({type(error).__name__}: {error}); "
            "leave it out, or change it or the template"
        ) from error


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


Span = tuple[int, int]


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


def _marked(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[Span]]:
    encoded: Any = tokenizer.apply_chat_template(
        list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids = list(encoded["input_ids"])
    marks = [*map(bool, encoded["assistant_masks"]), False]
    edges = [i for i, mark in enumerate(marks) if mark != (marks[i - 1] if i else False)]
    return ids, list(zip(edges[::2], edges[1::2], strict=True))


def _differenced(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[Span]]:
    ids = _ids(messages, tokenizer)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index == 0:
            continue
        before = _ids(messages[:index], tokenizer, add_generation_prompt=True)
        through = ids if index + 1 == len(messages) else _ids(messages[: index + 1], tokenizer)
        start, end = _common(before, ids), _common(through, ids)
        # Some templates render earlier turns differently later on (thoughts removed): such a turn is left out.
        if start >= len(before) - _BOUNDARY and end >= len(through) - _BOUNDARY and start < end:
            spans.append((start, end))
    return ids, spans


def _ids(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, **kwargs: Any) -> list[int]:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, **kwargs)
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

    Generation stops there: what a template puts after it (a line break, mostly) is never chosen by the target. Marks
    that end just before it are widened by it.
    """
    start, end = span
    if end < len(ids) and ids[end] in eos_ids and not (end > start and ids[end - 1] in eos_ids):
        return start, end + 1
    last = max((i for i in range(start, end) if ids[i] in eos_ids), default=None)
    if last is not None and not str(tokenizer.decode(ids[last + 1 : end])).strip():
        return start, last + 1
    return span
