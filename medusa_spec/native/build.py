"""Compiles the C kernels once per machine and loads them. Knows compilers and caches, no tensors."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from medusa_spec.default_model import cache_directory

SOURCE = "bf16_gemm.c"
COMPILE = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fopenmp", "-c")
TIMEOUT = 120.0
DISABLE = "MEDUSA_SPEC_NO_NATIVE"
"""Environment variable that keeps the kernels from being compiled or loaded."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """The loaded kernels, or why there are none.

    Attributes:
        handle: The library, or None.
        reason: Where it lies, or what stands in the way.
    """

    handle: ctypes.CDLL | None
    reason: str


@lru_cache(maxsize=1)
def library() -> Library:
    """The kernels of this machine, compiled if they are not cached; never raises."""
    if os.environ.get(DISABLE):
        return Library(handle=None, reason=f"{DISABLE} is set")
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    source = (files("medusa_spec.native") / SOURCE).read_bytes()
    path = cache_directory() / "native" / f"{Path(SOURCE).stem}-{_fingerprint(source)}.so"
    try:
        if not path.exists():
            if compiler is None:
                return Library(handle=None, reason="no C compiler (cc, gcc or clang) was found")
            compile_to(path, source, compiler)
        handle = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return Library(handle=None, reason=f"kernels could not be compiled or loaded: {str(detail).strip()[:400]}")
    return Library(handle=handle, reason=str(path))


def compile_to(path: Path, source: bytes, compiler: str) -> None:
    """Compiles C source to a shared library, under a temporary name until it is whole.

    OpenMP is left unresolved on purpose: torch has loaded its own, and two pools of threads would wait for each other.

    Raises:
        subprocess.SubprocessError: If the compiler fails or takes longer than `TIMEOUT` seconds.
        OSError: If the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        code, objects, result = (Path(scratch) / name for name in ("kernel.c", "kernel.o", "kernel.so"))
        code.write_bytes(source)
        for command in (
            [compiler, *COMPILE, str(code), "-o", str(objects)],
            [compiler, "-shared", str(objects), "-o", str(result)],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT)
        os.replace(result, path)


def _fingerprint(source: bytes) -> str:
    """Names source, flags and processor: a home folder shared by unlike machines must not mix their code."""
    processor = platform.processor() + platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass
    return hashlib.sha256(source + repr(COMPILE).encode() + processor.encode()).hexdigest()[:16]
