import importlib.util
import json
from pathlib import Path

import pytest

from medusa_spec.cli import main


def test_bench_prints_a_table_and_writes_the_figures(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "abcabcabc", "category": "a"}, {"turns": ["x", "y"], "category": "b"}]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    file = tmp_path / "folder" / "figures.json"
    arguments = [str(tiny_folder), "--prompts", str(prompts), "--max-new-tokens", "24"]
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments, "--json", str(file)])
    assert stopped.value.code == 0
    captured = capsys.readouterr()
    assert "tree / Hugging Face" in captured.out and "mu" in captured.out
    figures = json.loads(file.read_text())
    assert figures["equal"]["tree/hf"]["equal"] == figures["equal"]["tree/plain"]["equal"] == 2
    assert figures["settings"]["model"] == str(tiny_folder)
    assert set(figures["by_category"]) == {"a", "b"}
    assert list(file.parent.iterdir()) == [file]


def test_benchmark_script_ends_with_one_json_line(
    tiny_folder: Path, repository_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = repository_root / "benchmarks" / "speed.py"
    spec = importlib.util.spec_from_file_location("benchmark_speed", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main([str(tiny_folder), "--limit", "2", "--max-new-tokens", "8", "--drafter", "ngram"])
    *table, last = capsys.readouterr().out.rstrip("\n").split("\n")
    assert json.loads(last)["prompts"] == 2
    assert any("own plain" in line for line in table)
