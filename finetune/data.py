"""The data stage: conversations in, token ids with masks out, split into train and held-out."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from medusa_spec.errors import DataError
from medusa_spec.files import write_json
from medusa_spec.finetune import stages
from medusa_spec.finetune.chat import Rendered, chat_template_hash, has_generation_marks, render
from medusa_spec.finetune.choices import SELF
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data_counts import DataCounts, looping_spans
from medusa_spec.finetune.records import Message, Record, fingerprint, first_answer, select
from medusa_spec.finetune.template_fit import fit
from medusa_spec.finetune.tokens import TokenWriter

SPLITS = ("train", "held_out")
_CHOICES = ("max_records", "skip_unusable", "drop_loops", "drop_duplicates")
"""Settings that runs of older versions do not name: at their default they are not named either."""


def settings(config: FinetuneConfig, target: "HasTokenizer") -> dict[str, Any]:
    """What the data stage's result depends on."""
    tokenizer = target.tokenizer
    if config.distil:
        inputs = ["distil", stages.read_done(Path(config.output), "distil")["hash"]]
    elif config.data == (SELF,):
        inputs = ["self", config.self_conversations, config.self_new_tokens, config.seed, config.dtype]
    else:
        inputs = [fingerprint(name) for name in config.data]
    given = {name: getattr(config, name) for name in _CHOICES if getattr(config, name)}
    if config.data == (SELF,):
        given["written"] = stages.read_done(Path(config.output), "self")["hash"]
    return given | {
        "eos_ids": sorted(target.eos_ids),
        "model": config.model,
        "revision": config.revision,
        "inputs": inputs,
        "sources": config.sources,
        "max_length": config.max_length,
        "held_out": config.held_out,
        "chat_template": chat_template_hash(tokenizer),
        "vocabulary": len(tokenizer),
    }


class HasTokenizer(Protocol):
    """What this stage asks of a target: `Target` has it."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer, with its chat template."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids at which generation stops."""
        ...


def run_data(config: FinetuneConfig, target: HasTokenizer) -> dict[str, Any]:
    """Runs the stage, or finds it done.

    Returns:
        The manifest, which also lies in `data/manifest.json`.

    Raises:
        DataError: If a record cannot be used, or nothing is left to train on or to hold out.
    """
    output, wanted = Path(config.output), settings(config, target)
    if stages.begin(output, "data", wanted, younger=("eos_ids", "written")):
        return dict(stages.read_done(output, "data")["result"])
    folder = output / "data"
    folder.mkdir(exist_ok=True)
    unusable: list[DataError] = []
    records = selected(config, unusable)
    manifest = tokenize(records, target.tokenizer, target.eos_ids, folder, config, unusable)
    manifest["settings"] = wanted
    write_json(folder / "manifest.json", manifest)
    stages.finish(output, "data", wanted, manifest)
    return manifest


def selected(config: FinetuneConfig, unusable: list[DataError] | None = None) -> list[Record]:
    """The records that the run reads.

    Args:
        config: Names inputs and sources.
        unusable: Takes the errors of records that are left out since they cannot be used, if the settings allow it.
    """
    errors = (unusable if unusable is not None else []) if config.skip_unusable else None
    names = input_names(config)
    limit = config.max_records if names == list(config.data) else None  # what the model wrote was limited before
    return list(select(names, config.sources, limit=limit, unusable=errors))


def held_out_keys(records: Iterable[Record], share: float) -> set[str]:
    """Split keys of the held-out conversations: chosen by hash, so that order and additions move nothing.

    Raises:
        DataError: If there are fewer than two different prompts.
    """
    keys = sorted({record.split_key() for record in records})
    if len(keys) < 2:
        raise DataError(
            f"data must hold at least two different prompts, one to train on and one to hold out, got {len(keys)}"
        )
    chosen = {key for key in keys if int(key[:15], 16) < share * 16**15}
    return chosen - {keys[-1]} if chosen else {keys[0]}


def held_out_prompts(config: FinetuneConfig, limit: int) -> list[tuple[tuple[Message, ...], str]]:
    """Messages up to the first answer, and source, of held-out conversations; the sources take turns."""
    return [(record.messages, record.source or "") for record in held_out_records(config, limit) if record.messages]


def held_out_records(
    config: FinetuneConfig, limit: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> list[Record]:
    """Held-out conversations up to their first answer, and the first halves of texts; the sources take turns.

    They are read from the inputs again, since the token data hold no text.

    Args:
        config: Names the inputs.
        limit: Most of them.
        tokenizer: Its chat template shows them: they are changed as they were for training; None leaves them.
    """
    records = selected(config)
    keys = held_out_keys(records, config.held_out)
    found: dict[str, Record] = {}
    for record in records:
        key = record.split_key()
        if key in keys and key not in found:
            asked = _question(record, tokenizer, config.skip_unusable)
            if asked is not None:
                found[key] = asked
    groups: dict[str, list[Record]] = {}
    for key in sorted(found):
        groups.setdefault(found[key].source or "", []).append(found[key])
    turns = zip_longest(*groups.values())
    return [record for turn in turns for record in turn if record is not None][:limit]


def _question(record: Record, tokenizer: PreTrainedTokenizerBase | None, skip: bool) -> Record | None:
    """What stands before the first answer, half of a text; None if nothing does."""
    if record.text is not None:
        half = record.text[: len(record.text) // 2]
        begun = half.rpartition(" ")[0] or half
        return replace(record, text=begun) if begun.strip() else None
    if tokenizer is not None:
        try:
            record = fit(record, tokenizer).record
        except DataError:
            if not skip:
                raise
            return None
    first = first_answer(record.messages)
    return replace(record, messages=record.messages[:first]) if first else None


def input_names(config: FinetuneConfig) -> list[str]:
    """The inputs of the stage: the given ones, or what the model wrote."""
    if config.distil:
        return [str(Path(config.output) / "distil.jsonl")]
    return [str(Path(config.output) / "self.jsonl")] if config.data == (SELF,) else list(config.data)


def tokenize(
    records: list[Record],
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: frozenset[int],
    folder: Path,
    config: FinetuneConfig,
    unusable: Sequence[DataError] = (),
) -> dict[str, Any]:
    """Renders all records into `folder`.

    Args:
        records: Those that could be read.
        tokenizer: With the chat template.
        eos_ids: Ids at which generation stops.
        folder: Of the token data.
        config: Lengths, shares, and what is to be left out.
        unusable: Errors of the records that could not be read.

    Returns:
        Counts: by split, and of what was cut, skipped or left out; see `DataCounts`.
    """
    held_out = held_out_keys(records, config.held_out)
    writers = {split: TokenWriter(folder, split) for split in SPLITS}
    counts = DataCounts()
    counts.unusable += unusable
    for record in records:
        try:
            rendered = render(record, tokenizer, eos_ids)
        except DataError as error:
            if not config.skip_unusable:
                raise
            counts.unusable.append(error)
            continue
        kept = _kept(rendered, config, counts)
        if kept is not None:
            ids, mask, looping = kept
            counts.add(record, rendered, len(ids), looping)
            writers["held_out" if record.split_key() in held_out else "train"].add(ids, mask)
    for split, writer in writers.items():
        writer.flush()
        if not writer.conversations:
            raise DataError(
                f"data must leave at least one {split} conversation with an answer of two tokens within max_length = "
                f"{config.max_length}, got none ({counts.conversations['skipped']} skipped, {len(counts.unusable)} "
                "unusable); raise max_length or give more data"
            )
    return counts.to_dict() | {
        "splits": {split: writer.counts() for split, writer in writers.items()},
        "records": len(records),
        "chat_template_hash": chat_template_hash(tokenizer),
        "generation_marks": has_generation_marks(tokenizer),
    }


def _kept(rendered: Rendered, config: FinetuneConfig, counts: DataCounts) -> tuple[list[int], list[bool], int] | None:
    """Ids, mask, and how many of its answers repeat themselves, of a conversation; None if it is left out."""
    ids, mask = rendered.input_ids[: config.max_length], rendered.mask[: config.max_length]
    counts.conversations["cut"] += len(rendered.input_ids) > config.max_length
    looping = looping_spans(rendered, len(ids))
    if config.drop_loops:
        for start, end in looping:
            mask[start:end] = [False] * (end - start)
    if sum(mask) < 2:  # the first answer token is the root of a draft; a head needs one after it
        counts.conversations["skipped"] += 1
        return None
    if not counts.is_new(ids, mask) and config.drop_duplicates:
        return None
    return ids, mask, len(looping)
