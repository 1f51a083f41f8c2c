from pathlib import Path
from types import SimpleNamespace

import pytest

from medusa_spec.cli import demo, main
from medusa_spec.excuse import Difference
from medusa_spec.figures import Run
from medusa_spec.prompts import Prompt
from medusa_spec.testing import tiny_tokenizer


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
    assert "every token is the one that Hugging Face's generate gives" in shown
    assert "tree / hf" in shown and "tree / plain" in shown and "mu " in shown


@pytest.mark.parametrize(
    ("gap", "words"),
    [(0.3, "1 outputs differ from Hugging Face's, each at a tie"), (9.0, "please report this as a fault")],
)
def test_demo_says_what_is_behind_outputs_that_differ(monkeypatch: pytest.MonkeyPatch, gap: float, words: str) -> None:
    prompt = Prompt(messages=({"role": "user", "content": "x"},))
    record = SimpleNamespace(runs={"hf": Run((1, 2), 1.0), "tree": Run((1, 3), 1.0)})
    found = Difference(position=1, gap=gap, noise=0.1)
    monkeypatch.setattr(demo, "explain", lambda *args: found)
    loaded = SimpleNamespace(tokenizer=tiny_tokenizer())
    assert words in demo.ties(None, loaded, [prompt], SimpleNamespace(records=[record]))  # type: ignore[arg-type]


def test_demo_can_do_without_the_baseline(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEDUSA_SPEC_MODEL", str(tiny_folder))
    arguments = "demo --drafter ngram --limit 1 --max-new-tokens 4 --no-baseline".split()
    with pytest.raises(SystemExit):
        main(arguments)
    shown = capsys.readouterr().out
    assert "Hugging Face" not in shown and "tree / plain" in shown
