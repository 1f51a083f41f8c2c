"""Recording a step as a CUDA graph, and reading its results one step late. Knows functions and tensors, no decoding."""

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import cuda


class Recorder:
    """Records functions as CUDA graphs that share one memory pool; they must be replayed one at a time."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None

    def record(self, run: Callable[[], None], undo: Callable[[], None]) -> Callable[[], None]:
        """Runs a function twice, to warm up, and records it.

        What it reads and writes must lie where it is at every call. Warming up is on the stream of the recording, and
        the second time with synchronisations forbidden: a recording that they break leaves the allocator in disorder.

        Args:
            run: The function; it is not run by the recording itself.
            undo: Takes back what a run changed; called after each.

        Returns:
            Replays the recording on the current stream.

        Raises:
            GraphError: If it cannot be recorded; the reason is in the message. `run` itself may be called still.
        """
        if self._stream is None:
            self._pool, self._stream = cuda.graph_pool_handle(), cuda.Stream()
        self._stream.wait_stream(cuda.current_stream())
        try:
            with cuda.stream(self._stream):
                return self._warm_and_recorded(run, undo).replay
        finally:
            cuda.current_stream().wait_stream(self._stream)

    def _warm_and_recorded(self, run: Callable[[], None], undo: Callable[[], None]) -> Any:
        run()  # its own failures are its caller's
        undo()
        try:
            _without_synchronising(run)
            undo()
            return self._recorded(run)
        except Exception as error:
            undo()
            raise GraphError(f"{type(error).__name__}: {_first_line(error)}") from error

    def _recorded(self, run: Callable[[], None]) -> Any:
        graph = cuda.CUDAGraph()
        cuda.synchronize()
        # Other threads may go on with CUDA while this one records.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            with suppress(Exception):  # says that the recording was broken off: the reason is the one to keep
                graph.capture_end()
            raise
        graph.capture_end()
        return graph


class GraphError(RuntimeError):
    """A function that cannot be recorded as a CUDA graph."""


def _without_synchronising(run: Callable[[], None]) -> None:
    mode = cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says, once, that it may not notice all of them
        cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        cuda.set_sync_debug_mode(mode)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "without a message"


class LateReader:
    """Hands ints from the device to the host through pinned memory, so that the host waits for the oldest alone.

    ```
    put(step 1)  put(step 2)  take() -> step 1, while step 2 runs  put(step 3)  take() -> step 2 ...
    ```

    Args:
        like: A tensor of what is read, on its device.
        depth: Most that may be put before they are taken.
    """

    def __init__(self, like: torch.Tensor, depth: int = 2) -> None:
        self._cuda = like.device.type == "cuda"
        self._hosts = [
            torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=self._cuda) for _ in range(depth)
        ]
        self._events = [cuda.Event() if self._cuda else None for _ in range(depth)]
        self._put = self._taken = 0

    @property
    def waiting(self) -> int:
        """How many were put and not taken."""
        return self._put - self._taken

    def put(self, values: torch.Tensor) -> None:
        """Copies them as they will be when all that was asked of the device until now is done."""
        assert self.waiting < len(self._hosts)
        place = self._put % len(self._hosts)
        self._hosts[place].copy_(values, non_blocking=True)
        event = self._events[place]
        if event is not None:
            event.record()
        self._put += 1

    def take(self) -> list[int]:
        """The oldest; waits for it if need be."""
        assert self.waiting
        place = self._taken % len(self._hosts)
        event = self._events[place]
        if event is not None:
            event.synchronize()
        self._taken += 1
        return self._hosts[place].tolist()
