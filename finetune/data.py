"""The data stage: conversations in, token ids with masks out, split into train and held-out."""

from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from medusa_spec.errors import DataError
from medusa_spec.files import write_json
from medusa_spec.finetune import stages
from medusa_spec.finetune.chat import chat_template_hash, has_generation_marks, render
from medusa_spec.finetune.config import SELF, FinetuneConfig
from medusa_spec.finetune.records import Message, Record, fingerprint, select
from medusa_spec.finetune.tokens import TokenWriter

SPLITS = ("train", "held_out")


def settings(config: FinetuneConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What the data stage's result depends on."""
    if config.distil:
        inputs = ["distil", stages.read_done(Path(config.output), "distil")["hash"]]
    elif config.data == (SELF,):
        inputs = ["self", config.self_conversations, config.self_new_tokens, config.seed, config.dtype]
    else:
        inputs = [fingerprint(name) for name in config.data]
    return {
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
    output, wanted = Path(config.output), settings(config, target.tokenizer)
    if stages.begin(output, "data", wanted):
        return dict(stages.read_done(output, "data")["result"])
    folder = output / "data"
    folder.mkdir(exist_ok=True)
    records = list(select(input_names(config), config.sources))
    manifest = tokenize(records, target.tokenizer, target.eos_ids, folder, config)
    manifest["settings"] = wanted
    write_json(folder / "manifest.json", manifest)
    stages.finish(output, "data", wanted, manifest)
    return manifest


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
    """Messages up to the first answer, and source, of held-out conversations; the sources take turns.

    They are read from the inputs again, since the token data hold no text.
    """
    records = list(select(input_names(config), config.sources))
    keys = held_out_keys(records, config.held_out)
    found: dict[str, tuple[tuple[Message, ...], str]] = {}
    for record in records:
        key = record.split_key()
        if key in keys and record.messages and key not in found:
            first = next(i for i, turn in enumerate(record.messages) if turn["role"] == "assistant")
            if first:
                found[key] = record.messages[:first], record.source or ""
    groups: dict[str, list[tuple[tuple[Message, ...], str]]] = {}
    for key in sorted(found):
        groups.setdefault(found[key][1], []).append(found[key])
    turns = zip_longest(*groups.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][:limit]


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
) -> dict[str, Any]:
    """Renders all records into `folder`.

    Returns:
        Counts: by split, by source and licence, cut and skipped conversations.
    """
    held_out = held_out_keys(records, config.held_out)
    writers = {split: TokenWriter(folder, split) for split in SPLITS}
    cut = skipped = 0
    sources: Counter[str] = Counter()
    licenses: Counter[str] = Counter()
    for record in records:
        rendered = render(record, tokenizer, eos_ids)
        ids, mask = rendered.input_ids[: config.max_length], rendered.mask[: config.max_length]
        cut += len(rendered.input_ids) > config.max_length
        if sum(mask) < 2:  # the first answer token is the root of a draft; a head needs one after it
            skipped += 1
            continue
        writers["held_out" if record.split_key() in held_out else "train"].add(ids, mask)
        sources[record.source or "not given"] += 1
        licenses[record.license or "not given"] += 1
    for split, writer in writers.items():
        writer.flush()
        if not writer.conversations:
            raise DataError(
                f"data must leave at least one {split} conversation with an answer of two tokens within max_length = "
                f"{config.max_length}, got none ({skipped} skipped); raise max_length or give more data"
            )
    return {
        "splits": {split: writer.counts() for split, writer in writers.items()},
        "records": len(records),
        "cut": cut,
        "skipped": skipped,
        "sources": dict(sources),
        "licenses": dict(licenses),
        "chat_template_hash": chat_template_hash(tokenizer),
        "generation_marks": has_generation_marks(tokenizer),
    }
