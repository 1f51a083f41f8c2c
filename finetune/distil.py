"""The distil stage: the target answers the prompts itself, since heads are to guess its words and nobody else's."""

import time
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

from medusa_spec.batch import Sampling
from medusa_spec.errors import DataError
from medusa_spec.finetune import stages, written
from medusa_spec.finetune.chat import chat_template_hash
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.jsonl import Object, in_shards, write_objects
from medusa_spec.finetune.records import Record, fingerprint, first_answer, select
from medusa_spec.finetune.target import MARKS, Target, target_marks
from medusa_spec.finetune.template_fit import fit
from medusa_spec.finetune.writer import Prompt, Writer

SHARD = 256
"""Conversations per shard: what a kill can cost."""


def settings(config: FinetuneConfig, target: Target) -> dict[str, Any]:
    """What the stage's result depends on."""
    given = {name: getattr(config, name) for name in ("max_records", "skip_unusable") if getattr(config, name)}
    return given | {
        "model": config.model,
        "revision": config.revision,
        "inputs": [fingerprint(name) for name in config.data],
        "sources": config.sources,
        "new_tokens": config.distil_new_tokens,
        "temperature": config.distil_temperature,
        "batch": config.distil_batch,
        "max_length": config.max_length,
        "chat_template": chat_template_hash(target.tokenizer),
        "seed": config.seed,
        "dtype": str(target.dtype),
        **target_marks(config, target),
        **written.settings(config),
    }


def run_distil(config: FinetuneConfig, target: Target) -> dict[str, Any]:
    """Writes `distil.jsonl`, in shards, so that a run that was stopped goes on; does nothing unless `config.distil`.

    Returns:
        Counts: conversations, answers, tokens, those that did not end or went round in circles.

    Raises:
        DataError: If the tokenizer has no chat template, or a record is a text without turns.
    """
    if not config.distil:
        return {}
    output, wanted = Path(config.output), settings(config, target)
    if stages.begin(output, "distil", wanted, younger=MARKS):
        return dict(stages.read_done(output, "distil")["result"])
    if target.tokenizer.chat_template is None:
        raise DataError("distil needs a tokenizer with a chat template, but it has none; give answers as data instead")
    unusable: list[DataError] | None = [] if config.skip_unusable else None
    records = _fitting(config, target, unusable)
    began = time.perf_counter()
    with Writer(config, target, written.keep_of(config)) as writer:
        shards = [records[start : start + SHARD] for start in range(0, len(records), SHARD)]
        found = in_shards(
            output / "distil",
            "distil",
            len(shards),
            lambda number: answer_shard(config, writer, shards[number], number * SHARD),
        )
        speed = writer.tokens / (time.perf_counter() - began)
    kept = [{name: value for name, value in record.items() if name != "tokens"} for record in found]
    if not kept:
        raise DataError(f"data must hold prompts that leave room for an answer within max_length = {config.max_length}")
    write_objects(output / "distil.jsonl", kept)
    result = {
        "conversations": len(kept),
        "dropped": len(records) - len(kept),
        "tokens": sum(record["tokens"] for record in found),
        "unusable": len(unusable or ()),
        "unfinished": sum(not record["finished"] for record in kept),
        "loops": sum(record["loops"] for record in kept),
        "tokens_per_second": round(speed, 1),
    }
    stages.finish(output, "distil", wanted, result)
    return result


def _fitting(config: FinetuneConfig, target: Target, unusable: list[DataError] | None) -> list[Record]:
    """The records, as the chat template can show them."""
    records = []
    for record in select(config.data, config.sources, answered=False, limit=config.max_records, unusable=unusable):
        try:
            if record.messages and not first_answer(record.messages):
                raise DataError(f"{record.place}: distil needs a turn to be answered, got an answer alone")
            records.append(fit(record, target.tokenizer).record)
        except DataError as error:
            if unusable is None:
                raise
            unusable.append(error)
    return records


def answer_shard(config: FinetuneConfig, writer: Writer, records: list[Record], first: int) -> list[Object]:
    """The conversations of one shard with the target's own answers, turn by turn; those without room are left out."""
    for record in records:
        if record.text is not None:
            raise DataError(
                f"{record.place}: distil needs turns, `messages` or a `prompt`, got `text` alone; leave it out, or "
                "train on the texts as they are, without distil"
            )
    open_turns = {place: _Open(record) for place, record in enumerate(records, start=first)}
    waiting = deque(turns.prompt(writer, place) for place, turns in open_turns.items())
    answers = writer.write(waiting, config.distil_new_tokens, Sampling(temperature=config.distil_temperature))
    for answer in answers:
        turns = open_turns[int(str(answer.key))]
        turns.add(answer.text, answer.finished, answer.loops, answer.tokens)
        written.store(config, "distil", int(str(answer.key)), answer)
        if turns.goes_on:
            waiting.append(turns.prompt(writer, int(str(answer.key))))
    return [turns.to_object() for turns in open_turns.values() if turns.tokens]


class _Open:
    """A conversation whose answers are being written: the record's own answers are left out."""

    def __init__(self, record: Record) -> None:
        self.record = record
        begun = first_answer(record.messages)
        self.turns = list(record.messages[:begun])
        self.tokens, self.finished, self.loops = 0, True, False
        self._rest = deque(record.messages[begun + 1 :])

    def _take(self) -> None:
        """What stands before the next answer."""
        while self._rest and self._rest[0]["role"] != "assistant":
            self.turns.append(self._rest.popleft())
        if self._rest:
            self._rest.popleft()

    def prompt(self, writer: Writer, place: int) -> Prompt:
        told = {"tools": list(self.record.tools)} if self.record.tools else {}
        return Prompt(key=place, text=writer.chat(self.turns, **told), seed=("distil", place, len(self.turns)))

    def add(self, text: str, finished: bool, loops: bool, tokens: int) -> None:
        self.turns.append({"role": "assistant", "content": text})
        self.finished, self.loops, self.tokens = finished, loops, self.tokens + tokens
        if finished:
            self._take()

    @property
    def goes_on(self) -> bool:
        """Whether the user's next words stand there; after an answer that did not end, a user would not go on."""
        return self.finished and self.turns[-1]["role"] != "assistant"

    def to_object(self) -> Object:
        last = max(place for place, turn in enumerate(self.turns) if turn["role"] == "assistant")
        found: Object = {
            "messages": list(islice(self.turns, last + 1)),
            "finished": self.finished,
            "loops": self.loops,
            "tokens": self.tokens,
        }
        named: Object = {"source": self.record.source, "license": self.record.license}
        named |= {"tools": list(self.record.tools)} if self.record.tools else {}
        return found | {name: value for name, value in named.items() if value is not None}
