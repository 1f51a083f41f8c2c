"""Shows which tokens of a few conversations are trained on. Trains nothing, writes nothing."""

import sys
from itertools import islice
from typing import Any

from medusa_spec.errors import ConfigError, DataError
from medusa_spec.finetune.chat import Rendered, render
from medusa_spec.finetune.choices import SELF
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data import HasTokenizer
from medusa_spec.finetune.data_counts import looping_spans
from medusa_spec.finetune.records import Record, first_answer, select
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.template_fit import fit, show

COLOUR = ("\x1b[32;1m", "\x1b[0m")
BRACKETS = ("⟦", "⟧")


def preview(
    config: FinetuneConfig, *, limit: int = 3, colour: bool | None = None, target: HasTokenizer | None = None
) -> str:
    """The first conversations with the trained tokens marked, how many they are by answer, and what is left out.

    ```
    --- chats.jsonl:1 (messages): 4 of 14 tokens trained on, by answer 4
    <|im_start|>user
    Hi<|im_end|>
    <|im_start|>assistant
    ⟦Hello there.<|im_end|>⟧
    ```

    Args:
        config: Model and data.
        limit: Number of conversations.
        colour: Mark by colour instead of brackets; None does so on a terminal.
        target: Has the tokenizer; None loads that of `config.model`.
    """
    if config.data == (SELF,):
        raise ConfigError("data must name files or data sets to be shown; 'self' is what the model will write")
    target = target or Target(config)
    marks = COLOUR if (sys.stdout.isatty() if colour is None else colour) else BRACKETS
    unusable: list[DataError] | None = [] if config.skip_unusable else None
    blocks: list[str] = []
    answered = not config.distil
    for record in select(config.data, config.sources, answered=answered, limit=config.max_records, unusable=unusable):
        if len(blocks) == limit:
            break
        try:
            if config.distil:
                blocks.append(_asked(record, target))
            else:
                blocks.append(_block(record, render(record, target.tokenizer, target.eos_ids), config, target, marks))
        except DataError as error:
            if unusable is None:
                raise
            unusable.append(error)
    return "\n".join([*blocks, *(f"--- left out: {error}" for error in islice(unusable or (), limit))])


def _asked(record: Record, target: HasTokenizer) -> str:
    """What the target is asked first, where it writes the answers itself."""
    record = fit(record, target.tokenizer).record
    turns = record.messages[: first_answer(record.messages)]
    text = show(turns, target.tokenizer, record.tools, add_generation_prompt=True)
    return f"--- {record.place} ({record.form}): the target writes the answers itself (distil); it is asked\n{text}"


def _block(
    record: Record, rendered: Rendered, config: FinetuneConfig, target: HasTokenizer, marks: tuple[str, str]
) -> str:
    """One conversation: what is to be known of it, and its text."""
    ids, mask = rendered.input_ids[: config.max_length], rendered.mask[: config.max_length]
    looping = looping_spans(rendered, len(ids))
    for start, end in looping if config.drop_loops else ():
        mask[start:end] = [False] * (end - start)
    by_answer = [sum(mask[start:end]) for start, end in rendered.spans]
    head = f"--- {record.place} ({record.form}): {sum(mask)} of {len(ids)} tokens trained on, by answer "
    lines = [head + (" + ".join(map(str, by_answer)) or "none")]
    lines += [f"    ! {remark}" for remark in remarks(record, rendered, len(ids), len(looping), config.drop_loops)]
    if sum(mask) < 2:
        lines.append("    ! skipped: fewer than two trained tokens")
    return "\n".join([*lines, marked(ids, mask, target.tokenizer, marks)])


def remarks(record: Record, rendered: Rendered, length: int, looping: int, dropped: bool) -> list[str]:
    """What is cut, changed or left out, a line each.

    Args:
        record: The conversation.
        rendered: Its tokens.
        length: How many of them are read.
        looping: How many of its answers end in repetition.
        dropped: Whether these are left out.
    """
    found = [
        ("tokens cut off at max_length", len(rendered.input_ids) - length),
        ("answers of weight 0, not trained on", rendered.weightless),
        ("answers that the template shows differently later, not trained on", rendered.rewritten),
        (f"answers that end in repetition, {'not trained on' if dropped else 'trained on all the same'}", looping),
    ]
    told = [f"{words}: {count}" for words, count in found if count] + list(rendered.notes)
    return told + ([] if record.finished else ["the last answer did not end: its end of turn is not trained on"])


def marked(ids: list[int], mask: list[bool], tokenizer: Any, marks: tuple[str, str]) -> str:
    """The text, special tokens as they are written, with marks around what is trained on."""
    text, start = "", 0
    while start < len(ids):
        end = next((i for i in range(start, len(ids)) if mask[i] != mask[start]), len(ids))
        piece = str(tokenizer.decode(ids[start:end], skip_special_tokens=False))
        text += f"{marks[0]}{piece}{marks[1]}" if mask[start] else piece
        start = end
    return text
