"""Hidden states as engines dump them: a safetensors file a text. Knows files and tensors, no model.

The layout is that of vLLM's `extract_hidden_states`: `hidden_states` [T, L, H] and `token_ids` [T], named by request.
Which layers the L columns are stands nowhere in it; see `dumped`.
"""

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from medusa_spec.errors import CheckpointError, ConfigError
from medusa_spec.files import read_json, write_tensors, write_text
from medusa_spec.finetune.data import SPLITS
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.tokens import TokenData
from medusa_spec.unfinished import remove_unfinished

STATES, IDS = "hidden_states", "token_ids"


class Dump:
    """A folder of dumped texts, found by their tokens.

    Args:
        folder: It and the folders in it are looked through.
        max_length: Texts are found by their first so many tokens, too.

    Attributes:
        columns: L.
        hidden_size: H.

    Raises:
        ConfigError: If there is no such file.
        CheckpointError: If one cannot be read, or is not of this layout or of the same L and H as the others.
    """

    def __init__(self, folder: str | Path, max_length: int) -> None:
        self.folder = Path(folder)
        self.places: dict[bytes, Path] = {}
        self.columns = self.hidden_size = 0
        for path in dump_files(self.folder):
            ids, shape = read_ids(path)
            if self.columns and shape != (self.columns, self.hidden_size):
                raise CheckpointError(
                    f"{path} must hold {self.columns} columns of {self.hidden_size} as the files before it, got "
                    f"{shape[0]} of {shape[1]}; keep the dumps of two runs of an engine in two folders"
                )
            self.columns, self.hidden_size = shape
            for length in {len(ids), min(len(ids), max_length)}:
                self.places.setdefault(_name(ids[:length]), path)

    def find(self, ids: torch.Tensor, least: int) -> Path | None:
        """The file of a text.

        Args:
            ids: Int [T].
            least: How many of its first tokens the file must hold: an engine does not read the last one that it wrote.
        """
        for length in range(len(ids), max(least, 1) - 1, -1):
            path = self.places.get(_name(ids[:length]))
            if path is not None:
                return path
        return None


def dump_files(folder: Path) -> list[Path]:
    """The files of a dump.

    Raises:
        ConfigError: If there is none.
    """
    found = sorted(folder.rglob("*.safetensors"))
    if not found:
        packed = any(folder.rglob("*.safetensors.zst"))
        raise ConfigError(
            f"states_dump must be a folder of .safetensors files as an engine dumps them, got {str(folder)!r}, which "
            + ("holds compressed ones: unpack them (zstd -d)" if packed else "holds none")
        )
    return found


def dump_name(folder: str | Path) -> str:
    """Hash of the names and sizes of a dump's files: what tells it from another without reading all of it."""
    root = Path(folder)
    files = [(str(path.relative_to(root)), path.stat().st_size) for path in dump_files(root)]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]


def read_ids(path: Path) -> tuple[torch.Tensor, tuple[int, int]]:
    """Token ids [T] of a file, and its L and H.

    Raises:
        CheckpointError: If it cannot be read or is not of this layout.
    """
    try:
        with safe_open(path, framework="pt") as file:
            keys = set(file.keys())
            if not {STATES, IDS} <= keys:
                raise CheckpointError(
                    f"{path} must hold {STATES} and {IDS}, got {sorted(keys)}; is it of another program?"
                )
            ids, shape = file.get_tensor(IDS), tuple(file.get_slice(STATES).get_shape())
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); an engine may be writing it still: wait for it, or remove the file"
        ) from error
    if ids.dim() != 1 or len(shape) != 3 or shape[0] != len(ids):
        raise CheckpointError(
            f"{path} must hold {STATES} [T, L, H] and {IDS} [T], got {list(shape)} and {list(ids.shape)}"
        )
    return ids, (shape[1], shape[2])


def read_states(path: Path, rows: torch.Tensor, columns: Sequence[int]) -> torch.Tensor:
    """States [T, L, H] at rows (int64 [T]) and columns of a file.

    Raises:
        CheckpointError: If one is not finite.
    """
    with safe_open(path, framework="pt") as file:
        found = file.get_tensor(STATES)[rows][:, list(columns)]
    if not found.isfinite().all():
        raise CheckpointError(
            f"{path} holds states that are not finite; remove the file, or have the engine write it anew"
        )
    return found


def write_dump(output: Path, folder: Path) -> int:
    """Writes the states of a run as a dump: a column for every layer that heads tap, and last h, which has been through
    the last norm already.

    Args:
        output: Folder of the run, whose states are of whole texts.
        folder: Where the files go.

    Returns:
        The number of texts.

    Raises:
        ConfigError: If the run kept the states of answers alone.
    """
    manifest = read_json(output / "states" / "manifest.json")
    if not manifest["whole"]:
        raise ConfigError(
            f"the states in {output} are of answers alone, a dump is of whole texts; run the states stage for heads "
            "that attend (kind = 'eagle', say), and export those"
        )
    metadata = {"format": "pt", "columns": " ".join([*map(str, manifest["taps"]), "h"])}
    texts = 0
    remove_unfinished(folder)  # of an export that was killed: whoever reads a dump takes all its files
    for split in SPLITS:
        store, data = StateStore(output, split, 1), TokenData(output / "data", split)
        for text in store.texts():
            number = int(store.conversations[text.shard][text.start])
            rows = slice(text.start, text.start + text.length)
            parts = [store.layers[text.shard][rows]] if store.taps else []
            states = torch.cat([*parts, store.h[text.shard][rows][:, None]], 1).contiguous()
            tensors = {STATES: states, IDS: data[number].input_ids[: text.length].to(torch.int64)}
            write_tensors(folder / f"{split}-{number:07d}.safetensors", tensors, metadata)
            texts += 1
    return texts


def write_requests(output: Path, path: Path) -> int:
    """Writes what an engine is to read, a JSON object with `prompt_token_ids` a line: every conversation of a run whose
    data stage is finished.

    Returns:
        The number of conversations.
    """
    ids = [conversation.input_ids.tolist() for split in SPLITS for conversation in TokenData(output / "data", split)]
    write_text(path, "".join(json.dumps({"prompt_token_ids": row}) + "\n" for row in ids))
    return len(ids)


def _name(ids: torch.Tensor) -> bytes:
    return hashlib.sha256(ids.to(torch.int64).numpy().tobytes()).digest()


def main(arguments: Sequence[str] | None = None) -> None:
    """`requests RUN FILE`: what an engine is to read; `export RUN FOLDER`: a run's states as a dump."""
    parser = argparse.ArgumentParser(prog="python -m medusa_spec.finetune.dumps", description=main.__doc__)
    parser.add_argument("what", choices=("requests", "export"))
    parser.add_argument("run", type=Path)
    parser.add_argument("to", type=Path)
    given = parser.parse_args(arguments)
    {"requests": write_requests, "export": write_dump}[given.what](given.run, given.to)


if __name__ == "__main__":
    main()
