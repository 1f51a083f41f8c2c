"""The engine check counts as engines count, and calls unequal what is unequal. No engine runs in tests."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from medusa_spec import MedusaModel
from medusa_spec.testing import tiny
from medusa_spec.tree import chain_template

SCRIPTS = Path(__file__).parent.parent / "scripts"
PROMPTS = [[5, 17, 80, 3], [9, 9, 41], [64, 2, 100, 7, 1]]
GUESSES = 3


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("engine_check", SCRIPTS / "engine_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["engine_check"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model() -> MedusaModel:
    """Heads that are right now and then: fresh ones guess what the target says next, again."""
    target = tiny("llama")
    target.generation_config.eos_token_id = None
    return MedusaModel(target, tree=chain_template(GUESSES), probe=False)


def counted_by_hand(model: MedusaModel, prompt: list[int], tokens: list[int]) -> tuple[int, int, list[int]]:
    """Drafts, draft tokens and accepted by place, from the text alone: the guesses are read off single passes."""
    drafts, accepted, place = 0, [0] * GUESSES, 1
    # Guesses behind the end of a text count, too, as long as they are what the target would have said.
    ids = torch.tensor([prompt])
    longer = model.target.generate(ids, do_sample=False, max_new_tokens=len(tokens) + GUESSES)[
        0, len(prompt) :
    ].tolist()
    while place < len(tokens):
        text = prompt + longer[: place - 1] + [longer[place - 1]]
        h = model.backbone.states(torch.tensor([text[:-1]])).h[0, -1]
        guesses = model.heads(h).argmax(-1).tolist()[:GUESSES]
        drafts, right = drafts + 1, 0
        while right < GUESSES and guesses[right] == longer[place + right]:
            accepted[right] += 1
            right += 1
        place += right + 1
    return drafts, drafts * GUESSES, accepted


def test_counters_are_those_of_the_text(script, model) -> None:
    run = script.decode_here(model, PROMPTS, 20, "medusa", GUESSES)
    by_hand = [counted_by_hand(model, *pair) for pair in zip(PROMPTS, run.tokens, strict=True)]
    expected = [sum(counts) for counts in zip(*((d, n, *a) for d, n, a in by_hand), strict=True)]
    assert [run.drafts, run.draft_tokens, *run.per_position] == expected
    assert sum(run.per_position) > 0, "heads that are never right would show nothing"
    for prompt, tokens in zip(PROMPTS, run.tokens, strict=True):
        plain = model.target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)
        assert plain[0, len(prompt) :].tolist() == tokens


def test_equal_runs_have_no_differences_and_others_name_them(script, model) -> None:
    ours = script.decode_here(model, PROMPTS, 12, "medusa", GUESSES)
    there = replace(ours, engine="another 1.0", processes=3)
    assert script.differences(there, ours) == []
    changed = replace(there, tokens=[ours.tokens[0], [*ours.tokens[1][:4], 0, *ours.tokens[1][5:]], ours.tokens[2]])
    assert script.differences(changed, ours) == [
        "another 1.0, medusa, chain of 3, 3 processes: text 1 differs from token 4 on"
    ]
    (counted,) = script.differences(replace(there, per_position=[0, 0, 0]), ours)
    assert "accepted must be" in counted
    plain = replace(there, drafts=0, draft_tokens=0, per_position=[])  # an engine that was told not to draft
    assert script.differences(plain, ours) == []


def test_the_table_shows_each_run_beside_ours(script, model) -> None:
    ours = script.decode_here(model, PROMPTS[:1], 8, "medusa", GUESSES)
    there = replace(ours, engine="another 1.0", tokens=[[0]], per_position=[7, 1, 0], drafts=16)
    lines = script.table([(ours, ours), (there, ours)]).splitlines()
    assert "| medusa-spec | medusa, chain of 3 | 1 | 1 of 1 |" in lines[2]
    assert "| another 1.0 |" in lines[3] and "| 0 of 1 | 16 |" in lines[3] and lines[3].endswith("| 7, 1, 0 | 0.500 |")


def test_the_program_for_the_engine_needs_nothing_of_this_project() -> None:
    source = (SCRIPTS / "engine_check_vllm.py").read_text(encoding="utf-8")
    compile(source, "engine_check_vllm.py", "exec")
    assert "medusa_spec" not in source and "torch" not in source
