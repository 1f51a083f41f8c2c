"""medusa-spec corpus: texts that drafts may be looked up in."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from medusa_spec.cli.finetune import missing_package
from medusa_spec.drafters import SuffixCorpus
from medusa_spec.drafters.text_index import BETWEEN
from medusa_spec.errors import CheckpointError, ConfigError
from medusa_spec.vocabulary import vocabulary_identity

RECORDS = (".jsonl", ".ndjson", ".json", ".gz", ".parquet")
"""Ends of names of files of records (docs/data.md); all others are one text each."""


def add(*, folder: Path, files: list[Path], model: str, limit: int | None) -> None:
    """Add files to a corpus, which is made if it is not there, and say what it holds.

    Args:
        folder: The corpus.
        files: Texts in UTF-8, or records whose conversations go through the chat template.
        model: Folder or hub id of the model whose tokenizer reads them.
        limit: Most tokens held from now on; None for what was said before.

    Raises:
        ConfigError: If a file is missing or no text, or the corpus is of another tokenizer.
        DataError: If a record cannot be used; the line is named.
    """
    for file in files:
        if not file.is_file():
            raise ConfigError(f"expected files of texts or records, found no file {file}")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
    except OSError as error:
        raise CheckpointError(f"--model: expected a folder or a hub id, got {model!r}: {error}") from error
    corpus = SuffixCorpus(folder, limit, vocabulary_identity(tokenizer))
    corpus.add(ids for file in files for ids in _texts(file, tokenizer))
    print(_summary(corpus))


def show(*, folder: Path) -> None:
    """Say what a corpus holds.

    Raises:
        ConfigError: If there is none.
    """
    corpus = open_corpus(folder)
    print(_summary(corpus))
    for segment in corpus.segments:
        print(f"  {segment.path.name}: {len(segment)} tokens")


def open_corpus(folder: str | Path, identity: str | None = None) -> SuffixCorpus:
    """A corpus that is there.

    Raises:
        ConfigError: If there is none, or it is of another tokenizer.
    """
    if not Path(folder).is_dir():
        raise ConfigError(
            f"expected the folder of a corpus, found none at {folder}; `medusa-spec corpus add` makes one"
        )
    return SuffixCorpus(folder, identity=identity)


def _texts(file: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    if file.suffix in RECORDS:
        yield from _conversations(file, tokenizer)
        return
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"expected text in UTF-8, {file} holds none: {error}") from error
    yield list(tokenizer(text, verbose=False)["input_ids"])  # longer than the model's positions, perhaps


def _conversations(file: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    try:
        from medusa_spec.finetune.chat import render
        from medusa_spec.finetune.records import read_records
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    for record in read_records(str(file)):
        yield render(record, tokenizer, frozenset()).input_ids


def _summary(corpus: SuffixCorpus) -> str:
    texts = sum(int((segment.ids == BETWEEN).sum()) for segment in corpus.segments)
    identity = corpus.segments[-1].notes.get("identity") if corpus.segments else None
    return (
        f"{corpus.folder}: {texts} texts, {len(corpus)} tokens of at most {corpus.limit}, "
        f"in {len(corpus.segments)} files; tokenizer: {identity or 'not named'}"
    )
