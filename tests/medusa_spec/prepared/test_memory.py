"""Memory in large pages is memory."""

import pytest
import torch

from medusa_spec.prepared import memory
from medusa_spec.prepared.memory import PAGE, large_pages


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
