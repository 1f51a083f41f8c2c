"""The command says what it measured, in words and as JSON, and refuses what it cannot reckon with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_spec.checkpoint import save_heads
from medusa_spec.cli import main
from medusa_spec.config import MedusaConfig
from medusa_spec.heads import HeadsConfig, Projection, TokenEmbedding, make_heads
from medusa_spec.tree import PathValues, chain_template

K = 2


@pytest.fixture(scope="module")
def heads_of(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`heads_of("eagle", counted=True)`: a folder of fresh heads for the tiny model."""
    sizes = json.loads((tiny_folder / "config.json").read_text())

    def make(kind: str, *, counted: bool = True) -> Path:
        hidden, vocab = sizes["hidden_size"], sizes["vocab_size"]
        config = HeadsConfig(hidden_size=hidden, vocab_size=vocab, kind=kind, num_heads=K)
        projection = Projection(weight=torch.zeros(vocab, hidden))
        heads = make_heads(config, projection, None, TokenEmbedding(weight=torch.zeros(vocab, hidden)))
        counts = {(0,): 60, (1,): 20, (0, 0): 40, (0, 1): 5}
        values = PathValues(total=100, counts=counts, singles=((60, 20), (50, 10))) if counted else None
        saved = MedusaConfig(
            heads=config, base_model_name_or_path=str(tiny_folder), values=values, tree=chain_template(K)
        )
        folder = tmp_path_factory.mktemp("heads") / kind
        save_heads(folder, heads, saved, dtype=torch.float32)
        return folder

    return make


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *arguments, "--prefix", "12", "--repeats", "1"])
    captured = capsys.readouterr()
    return stopped.value.code or 0, captured.out, captured.err  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle"])
def test_one_line_of_json_holds_every_figure(heads_of: Any, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    code, out, _ = run(capsys, str(heads_of(kind)), "--json", "--context", "100", "--batch", "2")
    assert code == 0 and out.count("\n") == 1
    found = json.loads(out)
    assert [each["depth"] for each in found["depths"]] == [1, 2]
    assert set(found["costs"]["passes"]) == {"1", "2", "4", "8", "16", "32", "64"} == set(found["batch"])
    assert set(found["costs"]["drafts"]) == {"1", "2"} and found["rows"] == 2
    assert {each["nodes"] for each in found["sizes"]} >= {1, 2, 3, 5}
    assert found["sizes"][0]["mu"] == pytest.approx(0.6) and found["best"] in found["sizes"]
    memory = found["memory"]
    own = memory["heads_per_token"]
    assert (own > 0) == (kind == "eagle") and memory["cache"] == 100 * (memory["per_token"] + own)
    assert {each["name"] for each in found["advice"]} >= {"gain", "kernels", "compute", "batches", "temperature"}
    assert found["measured"] is None


def test_tables_are_for_people_and_prompts_are_measured(
    heads_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"prompt": "xyz"}\n')
    code, out, _ = run(capsys, str(heads_of("medusa")), "--measure", str(prompts), "--max-new-tokens", "8")
    assert code == 0
    for part in ("T(N) / T(1)", "<- best", "heads worth using", "a text of 4096 tokens", "measured on 2 prompts"):
        assert part in out
    assert "when not to draft" in out


def test_heads_that_were_not_counted_are_reckoned_by_what_they_need(
    heads_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, str(heads_of("medusa", counted=False)), "--json")
    found = json.loads(out)
    assert code == 0 and found["best"] is None and found["depths"] == []
    assert all(each["mu"] is None for each in found["sizes"]) and len(found["sizes"]) > 5


def test_a_model_without_heads_is_refused_by_name(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, str(tiny_folder))
    assert code == 2 and "--heads" in error and str(tiny_folder) in error and "ngram" in error


def test_prompts_that_are_not_there_are_named_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run(capsys, "no-such-model", "--measure", str(tmp_path / "none.jsonl"))
    assert code == 2 and "none.jsonl" in error
