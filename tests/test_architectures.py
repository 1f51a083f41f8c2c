"""The page of architectures is what was found, nothing on it is wrong, and a dozen of them are examined again here."""

import importlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_spec import MedusaModel

ROOT = Path(__file__).parent.parent
BENCHMARKS, DOCS = ROOT / "benchmarks", ROOT / "docs"
MODULES = ("architectures_tiny", "architectures_law", "architectures_table", "architectures")
DOZEN = {
    "gemma3n_text": "attention interface",  # layers that attend to another one's keys
    "deepseek_v3": "attention interface",
    "opt": "attention interface",
    "falcon": "4-D mask",
    "stablelm": "4-D mask",
    "gpt_neox_japanese": "4-D mask",
    "bloom": "paths as batch rows",
    "lfm2": "paths as batch rows",
    "qwen3_5_text": "paths as batch rows",
    "rwkv": "paths as batch rows",
    "mamba": "levels as batch rows",
    "jamba": "levels as batch rows",
}


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules by name, imported as the program imports them."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """What the page was made of."""
    return json.loads((DOCS / "architectures.json").read_text())


def test_the_page_is_made_of_its_json(sweep, facts) -> None:
    assert (DOCS / "architectures.md").read_text() == sweep.architectures_table.table(facts)


def test_every_architecture_has_a_verdict_and_none_is_wrong(sweep, facts) -> None:
    lines = facts["architectures"]
    assert {line["verdict"] for line in lines} <= set(sweep.architectures_table.ORDER) - {"wrong"}
    assert all(line["reason"] for line in lines if line["verdict"] != "exact")
    assert len({line["architecture"] for line in lines}) == len(lines) >= 190
    assert Counter(line["verdict"] for line in lines)["exact"] >= 130


def test_what_is_called_exact_had_drafts_accepted(facts) -> None:
    exact = [line for line in facts["architectures"] if line["verdict"] == "exact"]
    assert [line["architecture"] for line in exact if not line["accepted"] > 10] == []


@pytest.mark.parametrize("name", DOZEN)
def test_the_law_holds(sweep, facts, name) -> None:
    law = sweep.architectures_law.Law(sweep.architectures_tiny.tiny_model(name))
    found = law.examine()
    assert (found["verdict"], found["reason"], found["route"]) == ("exact", None, DOZEN[name])
    line = next(line for line in facts["architectures"] if line["architecture"] == name)
    assert line["route"] == found["route"]


def test_a_state_that_cannot_be_copied_is_refused_in_words(sweep) -> None:
    found = sweep.architectures_law.Law(sweep.architectures_tiny.tiny_model("recurrent_gemma")).examine()
    assert found["verdict"] == "refused"
    assert "linear_attention" in found["reason"] and "no copy of its cache holds" in found["reason"]


def test_a_wrong_answer_is_seen(sweep, monkeypatch) -> None:
    law = sweep.architectures_law.Law(sweep.architectures_tiny.tiny_model("opt"))
    generate = law._generate

    def off_by_one(model: Any, *args: Any, **kwargs: Any) -> list[int]:
        ids = generate(model, *args, **kwargs)
        return ids if model is law.model else [*ids[:-1], ids[-1] + 1]

    monkeypatch.setattr(law, "_generate", off_by_one)
    found = law.examine()
    assert found["verdict"] == "wrong" and "differs from new token 12 on" in found["reason"]


def test_one_that_dies_or_hangs_says_so(sweep, monkeypatch) -> None:
    module = sweep.architectures

    def die(name: str) -> dict[str, Any]:
        if name == "llama":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            torch.zeros(1)

    monkeypatch.setattr(module, "examine", die)
    monkeypatch.setattr(module, "SECONDS", 1)
    assert "its process ended" in module.guarded("llama")["reason"]
    assert "no answer within 1 seconds" in module.guarded("mamba")["reason"]


@pytest.mark.parametrize(
    ("name", "asked"),
    [("gemma3n_text", "hidden_states"), ("llama4_text", "attentions"), ("gemma3n_text", "attentions")],
)
def test_what_layers_of_other_kinds_show_is_what_plain_decoding_shows(sweep, name, asked) -> None:
    """Several streams of hidden states; attention within chunks, of which plain decoding keeps the last alone."""
    target = sweep.architectures_tiny.tiny_model(name)
    target.set_attn_implementation("eager")
    ids = torch.arange(3, 16)[None]
    settings = {"do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True, f"output_{asked}": True}
    plain = target.generate(ids, **settings)
    model = MedusaModel(target, drafter="ngram", speculation="fixed")
    found = model.generate(ids, **settings)
    assert torch.equal(found.sequences, plain.sequences) and "own loop" not in model.last_stats.rule
    for own, other in zip(found[asked], plain[asked], strict=True):
        for one, two in zip(own, other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
