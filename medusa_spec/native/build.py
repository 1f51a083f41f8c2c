"""Compiles the C kernels once per machine and loads them. Knows compilers and caches, no tensors."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from medusa_spec.default_model import cache_directory

SOURCES = ("linear.c", "norm.c", "gated.c", "argmax.c", "likeliest.c", "attention.c", "layer.c", "draft.c")
HEADERS = ("element.h", "team.h", "tile.h", "norm.h", "activation.h")
ELEMENTS = ("ELEMENT_BF16", "ELEMENT_F32")
"""Every source is compiled once for each."""

COMPILE = ("-O3", "-march=native", "-std=gnu11", "-ffp-contract=fast", "-fPIC", "-fopenmp", "-c")
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
    sources = {name: (files("medusa_spec.native") / name).read_bytes() for name in (*SOURCES, *HEADERS)}
    path = cache_directory() / "native" / f"kernels-{_fingerprint(b''.join(sources.values()))}.so"
    try:
        if not path.exists():
            if compiler is None:
                return Library(handle=None, reason="no C compiler (cc, gcc or clang) was found")
            compile_to(path, sources, compiler)
        handle = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return Library(handle=None, reason=f"kernels could not be compiled or loaded: {str(detail).strip()[:400]}")
    return Library(handle=handle, reason=str(path))


def compile_to(path: Path, sources: Mapping[str, bytes], compiler: str) -> None:
    """Compiles C sources to a shared library, under a temporary name until it is whole.

    OpenMP is left unresolved on purpose: torch has loaded its own, and two pools of threads would wait for each other.

    Args:
        path: The library.
        sources: Contents by file name; those that end in `.c` are compiled, once per element type.
        compiler: Command.

    Raises:
        subprocess.SubprocessError: If the compiler fails or takes longer than `TIMEOUT` seconds.
        OSError: If the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        folder = Path(scratch)
        for name, content in sources.items():
            (folder / name).write_bytes(content)
        units = [(name, element) for name in sources if name.endswith(".c") for element in ELEMENTS]

        def compile_unit(unit: tuple[str, str]) -> str:
            name, element = unit
            made = str(folder / f"{name}.{element}.o")
            _run([compiler, *COMPILE, f"-D{element}", str(folder / name), "-o", made])
            return made

        with ThreadPoolExecutor(min(len(units), os.cpu_count() or 1)) as pool:
            objects = list(pool.map(compile_unit, units))
        result = folder / "kernels.so"
        _run([compiler, "-shared", *objects, "-o", str(result)])
        os.replace(result, path)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT)


def _fingerprint(source: bytes) -> str:
    """Names source, flags and processor: a home folder shared by unlike machines must not mix their code."""
    processor = platform.processor() + platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass
    return hashlib.sha256(source + repr(COMPILE).encode() + processor.encode()).hexdigest()[:16]
