"""A user's streamer, which is ended once it has begun whatever happens. Knows no tokens."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


class Stream:
    """Hands on to a streamer and notes how far it is.

    Args:
        streamer: Has `put` and `end`, as transformers' `BaseStreamer`.
    """

    def __init__(self, streamer: Any) -> None:
        self.streamer = streamer
        self.open = False

    def put(self, value: torch.Tensor) -> None:
        """Hands ids on: the prompt [1, T], then tokens [1]."""
        self.open = True
        self.streamer.put(value)

    def end(self) -> None:
        """Says that nothing follows."""
        self.open = False
        self.streamer.end()


@contextmanager
def ended(streamer: Any) -> Iterator[Stream | None]:
    """A stream, ended on an error too: who reads it in another thread would wait for ever.

    One that has not begun is left alone, so that it can serve another call, of the target's own generate for instance.

    Args:
        streamer: The user's, or None.
    """
    if streamer is None:
        yield None
        return
    stream = Stream(streamer)
    try:
        yield stream
    except BaseException:
        if stream.open:
            with suppress(Exception):  # the first error is the one to tell
                stream.end()
        raise
