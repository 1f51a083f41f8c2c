"""The house stands as docs/architecture.md draws it: arrows of import, mirrored tests, docstrings.

Read with `ast`, never by importing, so a fault is named even in a file that cannot be imported.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers.cache_utils

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("tree", "heads", "medusa_spec", "finetune")

# Folder -> what of this project it may import; medusa_spec/cli has rights of its own.
OWN = {
    "tree": {"tree"},
    "heads": {"heads"},
    "medusa_spec": {"medusa_spec", "tree", "heads"},
    "cli": {"medusa_spec", "tree", "heads", "finetune", "cli"},
    "finetune": {"medusa_spec", "tree", "heads", "finetune"},
}
# Folder -> which other packages, beside the standard library.
_MODEL = {
    "accelerate",
    "huggingface_hub",
    "numpy",
    "peft",
    "safetensors",
    "tokenizers",
    "torch",
    "tqdm",
    "transformers",
}
OTHERS = {
    "tree": {"torch"},
    "heads": {"torch"},
    "medusa_spec": _MODEL | {"flash_attn"},
    "cli": _MODEL | {"rich", "typer"},
    "finetune": _MODEL | {"datasets", "matplotlib", "pyarrow"},
}
# Files that may import more than their folder: each is the one place that knows the thing.
EXTRA = {
    "heads/eagle.py": {"transformers"},
    "heads/target_config.py": {"transformers"},
    "heads/target_layer.py": {"transformers"},
    "medusa_spec/serving/vllm_proposer.py": {"vllm"},
}
# One file for each way of holding keys and values (growing slabs, buffers whose shapes never change), and the one that
# asks what the layers of a config keep.
CACHE_FILES = {"medusa_spec/cache.py", "medusa_spec/static_cache.py", "medusa_spec/layer_kinds.py"}
CACHE_CLASSES = {
    name
    for name, value in vars(transformers.cache_utils).items()
    if inspect.isclass(value) and value.__module__ == "transformers.cache_utils"
}


def source_files() -> list[Path]:
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return sorted(file for file in files if "__pycache__" not in file.parts)


SOURCES = source_files()
INITS = [file for file in SOURCES if file.name == "__init__.py"]
MODULES = [file for file in SOURCES if file.name not in ("__init__.py", "__main__.py")]


def each(files: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", files, ids=lambda file: str(file.relative_to(ROOT)))


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def folder_of(file: Path) -> str:
    parts = file.relative_to(ROOT).parts
    return "cli" if parts[:2] in (("medusa_spec", "cli"), ("medusa_spec", "__main__.py")) else parts[0]


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every import as (line, dotted name), those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def imports_of(file: Path) -> list[tuple[int, str]]:
    return list(imports(parse(file)))


def own_part(name: str) -> str:
    """Which part of the project `medusa_spec.x.y` is."""
    second = (name.split(".") + [""])[1]
    return second if second in ("tree", "heads", "finetune", "cli") else "medusa_spec"


def forbidden(folder: str, extra: set[str], name: str) -> bool:
    top = name.split(".")[0]
    if top == "medusa_spec":
        return own_part(name) not in OWN[folder]
    return top not in sys.stdlib_module_names and top not in OTHERS[folder] | extra


def names_cache_class(name: str) -> bool:
    if not name.startswith("transformers."):
        return False
    return "cache_utils" in name.split(".") or name.split(".")[-1] in CACHE_CLASSES


def public_definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Public functions and classes of a module, and the public methods of those classes."""
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        decorators = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
        if node.name.startswith("_") or decorators & {"overload", "override", "setter"}:
            continue
        yield f"{prefix}{node.name} (line {node.lineno})", node
        if isinstance(node, ast.ClassDef):
            yield from public_definitions(node.body, prefix=f"{node.name}.")


def test_sources_are_found() -> None:
    assert {folder_of(file) for file in SOURCES} == set(OWN)


@each(SOURCES)
def test_imports_follow_the_arrows(file: Path) -> None:
    extra = EXTRA.get(file.relative_to(ROOT).as_posix(), set())
    wrong = [(n, name) for n, name in imports_of(file) if forbidden(folder_of(file), extra, name)]
    assert wrong == [], f"{folder_of(file)}/ may not import these (line, name)"


def test_one_file_of_finetune_knows_peft() -> None:
    knows = [
        file.name
        for file in SOURCES
        if folder_of(file) == "finetune" and any(name.split(".")[0] == "peft" for _, name in imports_of(file))
    ]
    assert len(knows) <= 1


@each([file for file in SOURCES if file.relative_to(ROOT).as_posix() not in CACHE_FILES])
def test_only_the_caches_name_cache_classes(file: Path) -> None:
    assert [(n, name) for n, name in imports_of(file) if names_cache_class(name)] == []


@each(MODULES)
def test_each_source_file_has_its_mirrored_test(file: Path) -> None:
    mirror = ROOT / "tests" / file.relative_to(ROOT).with_name(f"test_{file.name}")
    assert mirror.is_file(), f"{mirror.relative_to(ROOT)} is missing"


@each(INITS)
def test_init_files_define_nothing(file: Path) -> None:
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    named = [node.name for node in ast.walk(parse(file)) if isinstance(node, definitions)]
    assert set(named) <= {"__getattr__", "__dir__"}


@each(SOURCES)
def test_public_names_have_docstrings(file: Path) -> None:
    tree = parse(file)
    assert ast.get_docstring(tree), "the module has no docstring"
    named = public_definitions(tree.body)
    assert [name for name, node in named if not ast.get_docstring(node)] == []


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("tree", "transformers.AutoModel"),
        ("tree", "medusa_spec.heads.config"),
        ("tree", "medusa_spec.MedusaModel"),
        ("heads", "medusa_spec.tree"),
        ("heads", "transformers.LlamaConfig"),
        ("medusa_spec", "medusa_spec.finetune.chat"),
        ("medusa_spec", "datasets.Dataset"),
        ("medusa_spec", "tree.mask"),
        ("finetune", "medusa_spec.cli.main"),
    ],
)
def test_a_wrong_arrow_is_seen(folder: str, name: str) -> None:
    assert forbidden(folder, set(), name)


def test_a_cache_class_is_seen() -> None:
    assert names_cache_class("transformers.DynamicCache")
    assert names_cache_class("transformers.cache_utils.Cache")
    assert not names_cache_class("transformers.AutoModel")
