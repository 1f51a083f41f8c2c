"""Memory in large pages is memory."""

import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_spec.prepared import memory
from medusa_spec.prepared.memory import PAGE, large_pages, leave_mapped_files


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [0, 1, 1000, PAGE, 3 * PAGE + 7])
def test_it_holds_what_is_written(count, dtype):
    got = large_pages(count, dtype).copy_(torch.arange(count) % 127)
    assert got.shape == (count,) and got.dtype == dtype
    assert torch.equal(got, (torch.arange(count) % 127).to(dtype))


def test_only_whole_pages_of_its_own_are_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(memory, "_madvise", lambda: lambda *args: asked.append(args))
    got = large_pages(3 * PAGE, torch.bfloat16)
    ((begin, length, _),) = asked
    assert begin % PAGE == length % PAGE == 0
    assert got.data_ptr() <= begin and begin + length <= got.data_ptr() + got.nbytes


def test_without_the_system_call_it_is_plain_memory(monkeypatch):
    monkeypatch.setattr(memory, "_madvise", lambda: None)
    assert large_pages(10, torch.float32).shape == (10,)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux lists what is mapped")
def test_weights_leave_mapped_files_with_all_their_bits(tmp_path):
    save_file({"a": torch.randn(300, 7), "b": torch.arange(5)}, tmp_path / "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    own, expected = torch.randn(3), {name: tensor.clone() for name, tensor in tensors.items()}
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    in_file = [name for name, at in places.items() if any(begin <= at < end for begin, end in memory._mapped_files())]
    own_place = own.data_ptr()
    leave_mapped_files([*tensors.values(), own])
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    assert all(tensors[name].data_ptr() != places[name] for name in in_file)
    assert own.data_ptr() == own_place
    assert not any(begin <= t.data_ptr() < end for t in tensors.values() for begin, end in memory._mapped_files())


def test_where_the_system_does_not_say_nothing_is_copied(tmp_path):
    assert memory._mapped_files(tmp_path / "none") == []
