"""The command exports and says how the folder is used."""

import json
import shlex
from pathlib import Path

import pytest
import torch

from medusa_spec.cli import main
from medusa_spec.cli.export import METHODS
from medusa_spec.export import FORMATS
from medusa_spec.model import MedusaModel


@pytest.fixture
def heads(tiny_folder: Path, tmp_path: Path) -> Path:
    """Heads with something in them, which name their target."""
    model = MedusaModel.from_pretrained(tiny_folder)
    for parameter in model.heads.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(tmp_path / "heads")
    return tmp_path / "heads"


def run(*arguments: str) -> object:
    with pytest.raises(SystemExit) as stopped:
        main(["export", *arguments])
    return stopped.value.code


def test_a_folder_for_vllm_is_written_with_the_call_that_reads_it(heads, tiny_folder, tmp_path, capsys) -> None:
    out = tmp_path / "for-vllm"
    assert run(str(heads), "--to", "vllm", "--output", str(out)) == 0
    said = capsys.readouterr().out.splitlines()
    assert "read back" in said[0]
    words = shlex.split(said[1])
    assert words[:3] == ["vllm", "serve", str(tiny_folder)]
    assert json.loads(words[4]) == {"method": "medusa", "model": str(out), "num_speculative_tokens": 4}
    assert (out / "medusa_lm_head.safetensors").is_file()


def test_a_class_for_vllm_is_shown_with_the_path_that_finds_it(heads, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert run(str(heads), "--to", "vllm-class", "--output", str(out)) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[1])
    assert words[0] == f"PYTHONPATH={out}"
    module, name = json.loads(words[-1])["model"].split(".")
    assert f"class {name}:" in (out / f"{module}.py").read_text()


def test_another_target_may_be_named(heads, tiny_folder, tmp_path, capsys) -> None:
    options = ("--to", "original", "--model", str(tiny_folder), "--output", str(tmp_path / "out"))
    assert run(str(heads), *options) == 0
    assert "authors' layout" in capsys.readouterr().out


def test_what_cannot_be_exported_ends_with_the_reason(heads, tmp_path, capsys) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert run(str(heads), "--output", str(tmp_path / "full")) != 0
    assert "must be new, empty or an earlier export" in capsys.readouterr().err


def test_vllm_has_a_method_for_every_family_that_is_exported_to_it() -> None:
    assert set(METHODS) == set(FORMATS["vllm"])
