import inspect
from types import SimpleNamespace

import pytest
import torch

from medusa_spec import graph
from medusa_spec.graph import GraphError, LateReader, Recorder


class Counter:
    """Adds to a number in a buffer, through a tensor that is made anew at each call."""

    def __init__(self) -> None:
        self.total, self.calls = torch.zeros(1, dtype=torch.long), 0

    def __call__(self) -> None:
        self.calls += 1
        self.total.add_((self.total * 2).index_select(0, torch.zeros(1, dtype=torch.long)) + 1)

    def undo(self) -> None:
        self.total.zero_()


def test_a_recording_goes_on_from_what_lies_in_the_buffers(cuda_stand_in):
    count = Counter()
    replay = Recorder().record(count, count.undo)
    assert count.total.tolist() == [0] and count.calls == 3
    seen = []
    for _ in range(3):
        replay()
        seen.append(int(count.total))
    assert seen == [1, 4, 13] and count.calls == 3
    count.total.fill_(5)
    replay()
    assert count.total.tolist() == [16]


def test_recordings_share_a_pool_and_a_stream(cuda_stand_in, monkeypatch):
    handles = []
    monkeypatch.setattr(cuda_stand_in, "graph_pool_handle", lambda: handles.append(1) or (0, len(handles)))
    recorder = Recorder()
    for count in (Counter(), Counter()):
        recorder.record(count, count.undo)
    assert len(handles) == 1


def test_what_makes_the_host_wait_is_found_before_the_recording(cuda_stand_in):
    count = Counter()

    def run() -> None:
        count()
        if count.total.item() > 100:
            count()

    with pytest.raises(GraphError, match="RuntimeError: .*_local_scalar_dense.* not permitted"):
        Recorder().record(run, count.undo)
    assert count.total.tolist() == [0]
    assert "record" not in cuda_stand_in.log and cuda_stand_in.mode == "default" and cuda_stand_in.inside is None


def test_a_recording_that_breaks_says_why_and_leaves_the_stream(cuda_stand_in, monkeypatch):
    count, calls = Counter(), []

    def run() -> None:
        calls.append(1)
        count()
        if len(calls) == 3:
            raise RuntimeError("CUDA error: operation not permitted\nmore about it")

    with pytest.raises(GraphError, match=r"^RuntimeError: CUDA error: operation not permitted$"):
        Recorder().record(run, count.undo)
    assert count.total.tolist() == [0] and cuda_stand_in.inside is None


def test_a_function_that_fails_by_itself_fails_as_it_does(cuda_stand_in):
    def run() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Recorder().record(run, lambda: None)


def test_the_stand_in_is_called_as_torch_s_graphs_are():
    begin = inspect.signature(torch.cuda.CUDAGraph.capture_begin)
    begin.bind(None, pool=(0, 1), capture_error_mode="thread_local")
    for name in ("capture_end", "replay"):
        inspect.signature(getattr(torch.cuda.CUDAGraph, name)).bind(None)
    for name in ("graph_pool_handle", "Stream", "stream", "current_stream", "synchronize", "Event"):
        assert callable(getattr(torch.cuda, name))
    for name in ("get_sync_debug_mode", "set_sync_debug_mode"):
        assert callable(getattr(torch.cuda, name))


def test_values_are_read_in_their_order_as_they_were_when_put():
    values = torch.zeros(3, dtype=torch.long)
    reader, seen = LateReader(values), []
    for step in range(5):
        values.fill_(step)
        reader.put(values)
        if reader.waiting == 2:
            seen.append(reader.take())
    seen.append(reader.take())
    assert seen == [[step] * 3 for step in range(5)] and reader.waiting == 0


def test_on_cuda_the_host_waits_for_the_oldest_alone(monkeypatch):
    log = []

    class Event:
        made = 0

        def __init__(self) -> None:
            self.name = Event.made
            Event.made += 1

        def record(self) -> None:
            log.append(("record", self.name))

        def synchronize(self) -> None:
            log.append(("wait", self.name))

    def empty(shape, *, dtype, device, pin_memory):
        assert pin_memory and device == "cpu"
        return torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr(graph, "cuda", SimpleNamespace(Event=Event))
    monkeypatch.setattr(graph, "torch", SimpleNamespace(empty=empty))
    reader = LateReader(SimpleNamespace(device=SimpleNamespace(type="cuda"), shape=(2,), dtype=torch.long))
    for step in range(3):
        reader.put(torch.full((2,), step))
        if step:
            assert reader.take() == [step - 1] * 2
    assert reader.take() == [2, 2]
    assert log == [
        *(("record", 0), ("record", 1), ("wait", 0), ("record", 0), ("wait", 1), ("wait", 0)),
    ]
