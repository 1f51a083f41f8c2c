"""Files of one JSON object a line, in shards: what a stage that writes texts has done so far. Knows no texts."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from medusa_spec.files import write_text

Object = dict[str, Any]


def write_objects(path: Path, objects: Iterable[Object]) -> None:
    """Writes a file, whole or not at all."""
    write_text(path, "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in objects))


def read_objects(path: Path) -> list[Object]:
    """The objects of a file, split at line feeds alone: JSON leaves other separators of lines, U+2028 for one, as they
    are."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def in_shards(folder: Path, name: str, count: int, write: Callable[[int], Iterable[Object]]) -> list[Object]:
    """All objects of `count` shards; those that are not there are written, each a file by itself.

    Args:
        folder: Where they lie.
        name: What the progress bar says.
        count: Number of shards.
        write: The objects of a shard by its number; it may depend on nothing else, so that a run that was stopped and
            taken up again writes what one that was not does.
    """
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{number:05d}.jsonl" for number in range(count)]
    for number, path in enumerate(tqdm(paths, desc=name, unit="shard")):
        if not path.exists():
            write_objects(path, write(number))
    return [value for path in paths for value in read_objects(path)]
