"""Kernels are compiled whole or not at all, and their absence is said."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from medusa_spec.native import build


@pytest.fixture(autouse=True)
def forget(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "cache_directory", lambda: tmp_path / "cache")
    build.library.cache_clear()
    yield
    build.library.cache_clear()


def test_a_second_load_compiles_nothing(monkeypatch):
    first = build.library()
    if first.handle is None:
        pytest.skip(f"no kernel on this machine: {first.reason}")
    build.library.cache_clear()
    monkeypatch.setattr(build, "compile_to", None)
    assert build.library().reason == first.reason


def test_without_a_compiler_the_reason_says_so(monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert build.library() == build.Library(handle=None, reason="no C compiler (cc, gcc or clang) was found")


def test_a_compiler_s_message_is_the_reason(monkeypatch):
    def fail(command, **kwargs):
        raise subprocess.CalledProcessError(1, command, stderr="error: no such flag")

    monkeypatch.setattr(build.subprocess, "run", fail)
    found = build.library()
    assert found.handle is None
    assert "no such flag" in found.reason


def test_a_failed_compilation_leaves_no_file(monkeypatch, tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        build.compile_to(tmp_path / "folder" / "kernel.so", {"broken.c": b"int x = ;"}, shutil.which("cc") or "false")
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_every_source_is_compiled_once_per_element_type(tmp_path):
    source = (
        b"#ifdef ELEMENT_BF16\nint size_bf16(void) { return SIZE; }\n#else\nint size_f32(void) { return SIZE; }\n#endif"
    )
    sources = {"one.c": b'#include "size.h"\n' + source, "size.h": b"#define SIZE 7\n"}
    build.compile_to(tmp_path / "kernels.so", sources, "cc")
    handle = ctypes.CDLL(str(tmp_path / "kernels.so"))
    assert (handle.size_bf16(), handle.size_f32()) == (7, 7)
    assert [file.name for file in tmp_path.iterdir()] == ["kernels.so"]


def test_all_sources_and_headers_are_named():
    """What is not named would neither be compiled nor change the library's file name."""
    folder = Path(build.__file__).parent
    assert {file.name for file in folder.glob("*.[ch]")} == {*build.SOURCES, *build.HEADERS}


def test_the_kernels_can_be_switched_off(monkeypatch):
    monkeypatch.setenv(build.DISABLE, "1")
    assert build.library().handle is None


def test_another_source_has_another_file():
    assert build._fingerprint(b"a") != build._fingerprint(b"b")
