"""Files that are whole or not there."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from medusa_spec import files
from medusa_spec.errors import CheckpointError
from medusa_spec.files import read_json, write_json, write_tensors, write_text


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"ü": [1, None]})
    write_tensors(tmp_path / "a.safetensors", {"x": torch.arange(3)})
    assert read_json(tmp_path / "a.json") == {"ü": [1, None]}
    assert torch.equal(load_file(tmp_path / "a.safetensors")["x"], torch.arange(3))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"x": torch.arange(3)})

    def full(tensors: object, target: Path, metadata: object = None) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    for name in ("a.safetensors", "b.safetensors"):
        with pytest.raises(OSError, match="No space left"):
            write_tensors(tmp_path / name, {"x": torch.arange(4)})
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    assert torch.equal(load_file(path)["x"], torch.arange(3))


def test_text_is_not_translated(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "é\n")
    assert (tmp_path / "a").read_bytes() == "é\n".encode()


@pytest.mark.parametrize("contents", [None, b"", b"{", b"\xff"])
def test_json_that_is_none_is_named(tmp_path: Path, contents: bytes | None) -> None:
    if contents is not None:
        (tmp_path / "a.json").write_bytes(contents)
    with pytest.raises(CheckpointError, match=r"a\.json cannot be read"):
        read_json(tmp_path / "a.json")
