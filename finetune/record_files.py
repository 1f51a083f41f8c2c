"""Values as they lie in files, folders and data sets, one after the other. Knows places, not what a record means."""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from medusa_spec.errors import DataError

Placed = tuple[str, Any]
"""File and line, for error messages, and the value there."""

_FILES = (".jsonl", ".ndjson", ".json", ".gz", ".parquet")
_NOT_DATA = (".", "dataset_info")
"""What hidden files begin with, and what describes a data set."""


@dataclass(frozen=True, kw_only=True)
class DataName:
    """What an input's name says: `path`, `name`, `name:split` or `name:configuration:split`.

    Attributes:
        name: A file, a folder, or a data set of the hub.
        configuration: The data set's configuration; None for its only one.
        split: Its split, perhaps with a slice (`train[:1000]`).
    """

    name: str
    configuration: str | None = None
    split: str = "train"

    @classmethod
    def parse(cls, name: str) -> "DataName":
        """Reads a name; colons within brackets belong to a slice.

        Raises:
            DataError: If it has too many parts.
        """
        if Path(name).exists():
            return cls(name=name)
        first, *rest = re.split(r":(?![^\[]*\])", name)
        if len(rest) > 2 or "" in rest:
            raise DataError(
                f"data must be a file, or a data set as name, name:split or name:configuration:split, got {name!r}"
            )
        return cls(name=first, configuration=rest[0] if len(rest) == 2 else None, split=rest[-1] if rest else "train")


def read_values(name: str, limit: int | None = None) -> Iterator[Placed]:
    """The values of a file, of a folder or of a data set of the hub, in their order.

    Args:
        name: See `DataName`. Files are `.jsonl` (a value a line), `.json` (the same, or one array), `.gz` of them, and
            `.parquet`; folders hold such files or are what `save_to_disk` of a data set has written.
        limit: Read the first so many; a data set of the hub is then streamed rather than downloaded.

    Raises:
        DataError: If there is no such file, or it cannot be read; the line is named.
    """
    path = Path(name)
    values = _file(path) if path.is_file() else _data_set(name, DataName.parse(name), stream=limit is not None)
    return islice(values, limit)


def _file(path: Path) -> Iterator[Placed]:
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.name.removesuffix(".gz").endswith(".json") and _first_byte(path) == b"[":
        return _array(path)
    return _lines(path)


def _open(path: Path) -> Any:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _first_byte(path: Path) -> bytes:
    """The first byte of a JSON file that is no white space or byte order mark."""
    with _open(path) as file:
        while line := _next_line(path, file):
            if text := line.lstrip(b"\xef\xbb\xbf \t\r\n"):
                return text[:1]
    return b""


def _array(path: Path) -> Iterator[Placed]:
    with _open(path) as file:
        try:
            values = json.loads(file.read().decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} must be a JSON array in UTF-8: {error}; restore the file") from error
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(path, error) from error
    for number, value in enumerate(values, 1):
        yield f"{path}:{number}", value


def _lines(path: Path) -> Iterator[Placed]:
    number = 0
    with _open(path) as file:
        while line := _next_line(path, file):
            number += 1
            if not line.strip():
                continue
            try:
                yield f"{path}:{number}", json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
                raise DataError(
                    f"{path}:{number}: a line must be one JSON object in UTF-8, got {line[:60]!r} ({error})"
                ) from error


def _next_line(path: Path, file: Any) -> bytes:
    try:
        return file.readline()
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read: {error}; restore the file")


def _parquet(path: Path) -> Iterator[Placed]:
    import pyarrow.parquet  # comes with `datasets`

    row = 0
    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from error
    for batch in batches:
        for value in batch.to_pylist():
            row += 1
            yield f"{path}:{row}", without_nulls(value)


def without_nulls(value: Any) -> Any:
    """A row without the fields that a table holds only because other rows have them, at any depth.

    ```
    {"name": "f", "arguments": {"city": "Oslo", "amount": None}}     "amount" is another tool's
    ```

    Content stays: a turn that says nothing says so.
    """
    if isinstance(value, dict):
        kept = ("content", "value")
        return {key: without_nulls(part) for key, part in value.items() if part is not None or key in kept}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def _check_all_read(folder: Path) -> None:
    """Of a folder, `datasets` reads one format, and files of one pattern of names where there are any.

    Raises:
        DataError: If that passes others by.
    """
    if not folder.is_dir():
        return
    from datasets import load_dataset_builder

    splits = load_dataset_builder(str(folder)).config.data_files or {}
    read = {Path(file).resolve() for files in splits.values() for file in files}
    there = [path for path in sorted(folder.rglob("*")) if path.name.endswith(_FILES) and path.is_file()]
    passed = [str(path) for path in there if path.resolve() not in read and not path.name.startswith(_NOT_DATA)]
    if passed:
        raise DataError(
            f"data {str(folder)!r} holds {len(passed)} files that would not be read with the others, {passed[0]} "
            "first: name the files one by one, or keep one format in the folder, and no file that is named as a split "
            "(train, test) beside others"
        )


def _data_set(name: str, wanted: DataName, *, stream: bool) -> Iterator[Placed]:
    folder = Path(wanted.name)
    if wanted.name.endswith(_FILES) and not folder.exists():
        raise DataError(f"data must name a file that is there or a hub data set, but there is no file {name!r}")
    try:
        from datasets import DatasetDict, load_dataset, load_from_disk
    except ImportError as error:
        raise DataError(
            f"data {name!r} is no file; to read it as a hub data set, pip install medusa-spec[finetune]"
        ) from error
    try:
        if any((folder / mark).is_file() for mark in ("state.json", "dataset_dict.json")):  # of `save_to_disk`
            loaded: Any = load_from_disk(wanted.name)
            loaded = loaded[wanted.split] if isinstance(loaded, DatasetDict) else loaded
        else:
            loaded = load_dataset(wanted.name, wanted.configuration, split=wanted.split, streaming=stream)
            _check_all_read(folder)
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"data {name!r} is neither a file nor a data set that can be loaded: {type(error).__name__}: {error}; "
            "name a split as name:split, and a configuration as name:configuration:split"
        ) from error
    for row, value in enumerate(loaded, start=1):
        yield f"{name}:{row}", without_nulls(value)
