"""Memory for weights: in large pages where the system has them, and out of mapped files. Knows no layouts."""

import ctypes
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

PAGE = 2 << 20
"""Bytes of a large page."""

_MADV_HUGEPAGE = 14  # Linux


def large_pages(count: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor of `count` elements on the CPU.

    Weights are read once per pass, from beginning to end; with pages of 4 KB the addresses alone cost a tenth of it.
    Large pages are asked for and not insisted on: where the system gives none, this is plain memory.
    """
    memory = torch.empty(count, dtype=dtype, device="cpu")
    begin = -(-memory.data_ptr() // PAGE) * PAGE
    length = (memory.data_ptr() + memory.nbytes) // PAGE * PAGE - begin
    advise = _madvise()
    if length > 0 and advise is not None:
        advise(begin, length, _MADV_HUGEPAGE)
    return memory


@lru_cache(maxsize=1)
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return function


def leave_mapped_files(tensors: Iterable[torch.Tensor]) -> None:
    """Copies tensors that lie in a file mapped into memory, in place.

    Hugging Face loads safetensors that way. While one weight remains there the whole file stays mapped, and the pages
    of those that were packed are counted twice.
    """
    ranges = _mapped_files()
    for tensor in tensors:
        if any(begin <= tensor.data_ptr() < end for begin, end in ranges):
            tensor.data = tensor.data.clone()


def _mapped_files(maps: Path = Path("/proc/self/maps")) -> list[tuple[int, int]]:
    """Addresses of weights' files in this process; none where the system does not say."""
    try:
        lines = [line.split(maxsplit=5) for line in maps.read_text().splitlines()]
    except OSError:
        return []
    found = [fields[0].split("-") for fields in lines if len(fields) == 6 and fields[5].endswith(".safetensors")]
    return [(int(begin, 16), int(end, 16)) for begin, end in found]
