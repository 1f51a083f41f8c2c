from pathlib import Path

import pytest

from medusa_spec.cli import main


def test_demo_shows_both_ways_and_ends_with_the_comparison(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEDUSA_SPEC_MODEL", str(tiny_folder))
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--drafter", "ngram", "--limit", "2", "--max-new-tokens", "24"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert shown.count("plain (N = 1):") == shown.count("project, tree:") == 2
    assert "same output, tree and plain: 2 of 2" in shown
    assert "same output, tree and Hugging Face: 2 of 2" in shown
    assert "tree / hf" in shown and "tree / plain" in shown and "mu " in shown


def test_demo_can_do_without_the_baseline(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEDUSA_SPEC_MODEL", str(tiny_folder))
    arguments = "demo --drafter ngram --limit 1 --max-new-tokens 4 --no-baseline".split()
    with pytest.raises(SystemExit):
        main(arguments)
    shown = capsys.readouterr().out
    assert "Hugging Face" not in shown and "tree / plain" in shown
