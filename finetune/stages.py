"""What makes a stage resumable: its settings are noted when it begins and again when it is done."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_spec.errors import ConfigError
from medusa_spec.files import read_json, write_json


def settings_hash(settings: dict[str, Any]) -> str:
    """Short stable hash of a dict of plain values."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def done_path(output: Path, stage: str) -> Path:
    """The file whose presence says that `stage` is finished."""
    return output / f"{stage}.done.json"


def read_done(output: Path, stage: str) -> dict[str, Any]:
    """The record of a finished stage.

    Raises:
        ConfigError: If it is not finished.
    """
    path = done_path(output, stage)
    if not path.exists():
        raise ConfigError(f"stage {stage!r} must be finished first, but {path} is not there; run it before this one")
    return dict(read_json(path))


def begin(output: Path, stage: str, settings: dict[str, Any], *, younger: Sequence[str] = ()) -> bool:
    """Notes the settings of a stage that begins, or checks that they are those of the begun one.

    Args:
        output: Folder of the run.
        stage: Its name.
        settings: What its result depends on.
        younger: Settings that runs of older versions did not note: where one is missing, nothing is compared.

    Returns:
        Whether the stage is already finished, with the same settings.

    Raises:
        ConfigError: If the stage was begun or finished with other settings: what it left must not be mixed in.
    """
    output.mkdir(parents=True, exist_ok=True)
    settings = json.loads(json.dumps(settings))
    done, begun = done_path(output, stage), output / f"{stage}.begun.json"
    for path in (done, begun):
        if path.exists():
            old = read_json(path)["settings"]
            unknown = {key for key in younger if key not in old}
            _refuse_change(stage, old, {key: settings[key] for key in settings if key not in unknown}, output)
    if done.exists():
        return True
    write_json(begun, {"settings": settings})
    return False


def finish(output: Path, stage: str, settings: dict[str, Any], result: dict[str, Any]) -> None:
    """Writes the done file, last, with the result's summary."""
    settings = json.loads(json.dumps(settings))
    record = {"stage": stage, "settings": settings, "hash": settings_hash(settings), "result": result}
    write_json(done_path(output, stage), record)
    (output / f"{stage}.begun.json").unlink(missing_ok=True)


LEFT = {
    "self": ("self.jsonl", "written/self-*"),
    "distil": ("distil.jsonl", "written/distil-*"),
    "calibrate": ("heads",),
}
"""What stages leave outside a folder of their own name."""


def forget(output: Path, stage: str) -> None:
    """Removes what a stage left, so that it starts afresh."""
    left = [path for pattern in LEFT.get(stage, ()) for path in output.glob(pattern)]
    for path in (done_path(output, stage), output / f"{stage}.begun.json", output / stage, *left):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _refuse_change(stage: str, old: dict[str, Any], new: dict[str, Any], output: Path) -> None:
    changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    if changed:
        lines = "; ".join(f"{key} was {_short(old.get(key))}, is {_short(new.get(key))}" for key in changed)
        raise ConfigError(
            f"stage {stage!r} in {output} was run with other settings: {lines}. "
            f"Choose another output folder, or run again from this stage on (redo={stage!r}), which "
            "deletes what it and the later stages left."
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
