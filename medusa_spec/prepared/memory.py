"""Memory for packed weights, in large pages where the system has them. Knows no layouts."""

import ctypes
import sys
from functools import lru_cache
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
