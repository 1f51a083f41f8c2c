"""A folder's tensors are found by name and read on demand; nothing in a pickle is run."""

import json
import pickle
import re

import pytest
import torch
from safetensors.torch import save_file

from medusa_spec.errors import CheckpointError
from medusa_spec.formats.contents import has_tensors, read_contents, tensor_files

A, B = torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16)


class Harm:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("file", ["x.safetensors", "x.pt", "x.bin"])
def test_tensors_are_read_as_they_are(file, write):
    contents = read_contents(write({"a": A, "b": B}, {"k": 1}, file=file))
    assert sorted(contents.files) == ["a", "b"] and contents.config == {"k": 1}
    assert torch.equal(contents.read(["a"])["a"], A) and torch.equal(contents.read(["b"])["b"], B)


def test_a_pickle_of_before_2020_is_read(tmp_path):
    torch.save({"a": A}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(read_contents(tmp_path).read(["a"])["a"], A)


@pytest.mark.parametrize("new", [True, False])
def test_a_pickle_that_runs_code_is_not_run(new, tmp_path):
    folder, sign = tmp_path / "heads", tmp_path / "it ran"
    folder.mkdir()
    if new:
        torch.save({"a": A, "harm": Harm(sign)}, folder / "x.pt")
    else:
        (folder / "x.pt").write_bytes(pickle.dumps(Harm(sign), protocol=2))
    with pytest.raises(CheckpointError, match=r"x\.pt (holds more than tensors|cannot be read)"):
        read_contents(folder)
    assert not sign.exists()


@pytest.mark.parametrize(
    "value", [[A], {"step": 3}, {"state_dict": {"a": A}}, A], ids=["list", "int", "nested", "bare"]
)
def test_a_pickle_of_no_state_dict_is_refused(value, tmp_path):
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="must hold tensors by name"):
        read_contents(tmp_path)


@pytest.mark.parametrize("file", ["x.safetensors", "x.pt", "x.bin"])
@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b""], ids=["half", "empty"])
def test_a_damaged_file_is_named(damage, file, write):
    folder = write({"a": A}, file=file)
    (folder / file).write_bytes(damage((folder / file).read_bytes()))
    with pytest.raises(CheckpointError, match=f"{re.escape(file)} (cannot be read|holds more than tensors)"):
        read_contents(folder)


def test_what_trainers_leave_is_not_taken_for_weights(tmp_path):
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", "notes.txt"):
        (tmp_path / name).write_bytes(b"not weights")
    assert tensor_files(tmp_path) == [] and not has_tensors(tmp_path) and not has_tensors(tmp_path / "notes.txt")
    save_file({"a": A}, tmp_path / "x.safetensors")
    assert has_tensors(tmp_path) and list(read_contents(tmp_path).files) == ["a"]


def test_a_pickle_beside_its_safetensors_is_not_read(write):
    write({"a": A + 1, "c": B}, file="x.pt")
    contents = read_contents(write({"a": A, "b": B}))
    assert torch.equal(contents.read(["a"])["a"], A) and "c" in contents.files


def test_a_tensor_in_two_files_is_an_error_once_it_is_wanted(write):
    write({"a": A, "b": B}, file="1.safetensors")
    contents = read_contents(write({"a": A, "c": B}, file="2.safetensors"))
    assert sorted(contents.read(["b", "c"])) == ["b", "c"]
    with pytest.raises(CheckpointError, match=r"must hold a once, got 2: in 1\.safetensors, 2\.safetensors"):
        contents.read(["a"])


def test_an_index_is_believed_and_only_wanted_shards_are_opened(write):
    folder = write({"a": A}, file="1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}}))
    contents = read_contents(folder)
    assert torch.equal(contents.read(["a"])["a"], A)
    with pytest.raises(CheckpointError, match=r"2\.safetensors cannot be read"):
        contents.read(["b"])
    with pytest.raises(CheckpointError, match=r"1\.safetensors must hold \['c'\], as its index says"):
        contents.read(["a", "c"])
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="must hold a weight_map"):
        read_contents(folder)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_config_that_is_none_is_named(text, write):
    folder = write({"a": A})
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json (cannot be read|must hold a JSON object)"):
        read_contents(folder)


def test_names_beside_are_those_of_the_same_files(write):
    write({"0.w": A, "x": B}, file="1.safetensors")
    contents = read_contents(write({"y": B}, file="2.safetensors"))
    assert sorted(contents.names_beside(re.compile(r"\d\.w"))) == ["0.w", "x"]
    assert contents.names_beside(re.compile("z")) == []
