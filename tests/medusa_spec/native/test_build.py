"""Kernels are compiled whole or not at all, and their absence is said."""

import shutil
import subprocess

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
        build.compile_to(tmp_path / "folder" / "kernel.so", b"int x = ;", shutil.which("cc") or "false")
    assert list((tmp_path / "folder").iterdir()) == []


def test_the_kernels_can_be_switched_off(monkeypatch):
    monkeypatch.setenv(build.DISABLE, "1")
    assert build.library().handle is None


def test_another_source_has_another_file():
    assert build._fingerprint(b"a") != build._fingerprint(b"b")
