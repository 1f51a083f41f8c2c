"""What the documents show exists: commands, options, files, links, and every name in `__all__`."""

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from medusa_spec.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCUMENTS = sorted({README, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})
PACKAGES = ["medusa_spec"] + [
    f"medusa_spec.{name}" for name in ("cli", "drafters", "finetune", "formats", "heads", "tree")
]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]+)")
SOURCE_NAME = re.compile(r"[\w./-]+\.py\b")


def each_document() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))


def blocks(text: str) -> list[tuple[str, str]]:
    """Fenced blocks as (language, body)."""
    return FENCE.findall(text)


def commands(text: str, program: str) -> Iterator[list[str]]:
    """Lines of fenced blocks that call a program, split as a shell would, comments left out."""
    for _, body in blocks(text):
        for line in body.replace("\\\n", " ").splitlines():
            words = line.strip().removeprefix("$ ").removeprefix(".venv/bin/")
            if words.split(" ")[0] == program:
                yield shlex.split(words, comments=True)[1:]


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))


def unknown_options(words: list[str]) -> list[str]:
    """What of a `medusa-spec` call the command line would refuse by name."""
    command, words = typer.main.get_command(app), list(words)
    while hasattr(command, "commands"):  # a group
        if words[0].startswith("-"):
            return [word for word in words if word != "--help"]
        if words[0] not in command.commands:
            return [words[0]]
        command = command.commands[words.pop(0)]
    options = {option for parameter in command.params for option in parameter.opts}
    shown = {word.split("=")[0] for word in words if word.startswith("--")}
    return sorted(shown - options - {"--help"})


@each_document()
def test_shown_make_targets_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    shown = {word for words in commands(text, "make") for word in words if "=" not in word}
    shown |= set(re.findall(r"`make ([a-z][\w-]*)", text))
    assert shown <= make_targets()


@each_document()
def test_shown_commands_and_options_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    calls = [words for words in commands(text, "medusa-spec") if words]
    assert [(words, unknown_options(words)) for words in calls if unknown_options(words)] == []
    inline = set(re.findall(r"`medusa-spec ([a-z][\w-]*)", text))
    assert inline <= set(typer.main.get_command(app).commands)


@each_document()
def test_python_blocks_compile(document: Path) -> None:
    for number, (language, body) in enumerate(blocks(document.read_text(encoding="utf-8"))):
        if language in ("python", "py"):
            compile(body, f"{document.name}, block {number}", "exec")


@each_document()
def test_links_lead_somewhere(document: Path) -> None:
    targets = LINK.findall(document.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target and ":" not in target]
    assert [target for target in local if not (document.parent / target).exists()] == []


def test_files_that_the_readme_names_exist() -> None:
    named = set(SOURCE_NAME.findall(README.read_text(encoding="utf-8")))
    folders = ("medusa_spec", "heads", "tree", "finetune", "tests", "examples", "benchmarks")
    there = {
        file.relative_to(ROOT).as_posix() for folder in (*folders, "scripts") for file in (ROOT / folder).rglob("*.py")
    }
    assert [name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in there)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_exists(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)] == []


def test_every_extra_and_dependency_has_its_line() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8").lower()
    section = pyproject.split("dependencies = [", 1)[1].split("[project.scripts]")[0]
    named = set(re.findall(r'"([\w-]+)(?:>=|;|\[)', section)) - {"medusa-spec"}
    assert {"torch", "datasets", "ruff"} <= named
    assert sorted(name for name in named if not re.search(rf"\b{name}\b", page)) == []


def test_a_wrong_command_is_seen() -> None:
    text = "```\nmedusa-spec teach --model x\nmedusa-spec demo --colour red\nmake coffee  # now\n```\n"
    assert [unknown_options(words) for words in commands(text, "medusa-spec")] == [
        ["teach"],
        ["--colour"],
    ]
    assert list(commands(text, "make")) == [["coffee"]]


def test_every_function_that_papers_are_traced_to_exists() -> None:
    names = re.findall(r"`(medusa_spec\.[\w.]+)`", (ROOT / "docs" / "papers.md").read_text(encoding="utf-8"))
    assert len(names) > 20
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
