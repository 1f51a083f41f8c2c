"""The class that vLLM loads guesses what the heads guess, for every text of a step, and changes nothing else of vLLM.

vLLM itself is a stand-in here; `scripts/engine_check.sh` runs the class in the real one.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_spec import MedusaModel, export_heads
from medusa_spec.heads import HeadsConfig, MedusaHeads
from medusa_spec.serving import vllm_proposer
from medusa_spec.testing import tiny

H, V, K = 32, 128, 3
DRAFT = torch.tensor([1, 5, 9, 40, 70, 99, 127])


class Runner:
    """What is wrapped of vLLM's runner: the method that asks the drafter, as version 0.32 has it."""

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        hidden_states: Any,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> list[list[int]]:
        return self.drafter.propose(sampled_token_ids, None, None, slot_mappings=slot_mappings)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> type[Runner]:
    """A fresh runner where the class looks for vLLM's."""
    fresh = type("GPUModelRunner", (Runner,), {"propose_draft_token_ids": Runner.propose_draft_token_ids})
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType("vllm.v1.worker.gpu_model_runner")
    module.GPUModelRunner = fresh  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return fresh


def vllm_config(guesses: int = K) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=guesses),
        model_config=SimpleNamespace(dtype=torch.float64),
        device_config=SimpleNamespace(device="cpu"),
    )


@pytest.fixture
def exported(tmp_path: Path) -> Callable[..., tuple[MedusaModel, ModuleType]]:
    """`exported(draft=…, **config)`: a model with random heads, and the module as the export copied it."""

    def make(*, draft: torch.Tensor | None = None, **config: Any) -> tuple[MedusaModel, ModuleType]:
        target = tiny("llama")
        target.config.name_or_path = "org/base"
        plain = MedusaModel(target, drafter="ngram", probe=False, prepare=False)
        size = None if draft is None else len(draft)
        sizes = HeadsConfig(hidden_size=H, vocab_size=V, num_heads=K, draft_vocab_size=size, **config)
        heads = MedusaHeads(sizes, plain.backbone.projection().rows(draft), draft).double()
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        plain.detach()
        model = MedusaModel(target, heads, probe=False, prepare=False)
        report = export_heads(model, tmp_path / "out", to="vllm-class")
        assert report.same_guesses and report.notes == ()
        return model, load(tmp_path / "out")

    return make


def load(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("copied_proposer", folder / "vllm_proposer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ask(
    proposer: Any, runner: type[Runner], sampled: list[list[int]], states: torch.Tensor, drafted: list[int] | None
) -> Any:
    one = runner()
    one.drafter = proposer
    metadata = None if drafted is None else SimpleNamespace(num_draft_tokens=drafted)
    return one.propose_draft_token_ids(None, sampled, None, None, states, None, metadata, None, None)


CASES = {
    "shared": {},
    "draft vocabulary": {"draft": DRAFT},
    "own": {"lm_head": "own"},
    "low rank, draft vocabulary": {"lm_head": "low_rank", "rank": 3, "draft": DRAFT},
    "two blocks": {"num_layers": 2},
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_chains_are_the_heads_first_guesses_at_the_last_accepted_token(case, exported, runner) -> None:
    model, module = exported(**case)
    proposer = module.MedusaHeads(vllm_config())
    proposer.load_model(SimpleNamespace(compute_logits=model.target.lm_head))
    states = torch.randn(4 + 1 + 3, H, dtype=torch.float64)
    # Three texts: of a draft of 3 two were accepted; no draft; of a draft of 2 none was accepted.
    chains = ask(proposer, runner, [[7, 8, 9], [5], [6]], states, [3, 0, 2])
    with torch.inference_mode():
        best = model.heads(states[[2, 4, 5]]).argmax(-1).T
    assert chains == (best if "draft" not in case else DRAFT[best]).tolist()


def test_a_text_whose_prompt_is_not_read_gets_no_chain(exported, runner) -> None:
    _, module = exported(draft=DRAFT)
    proposer = module.MedusaHeads(vllm_config())
    chains = ask(proposer, runner, [[], [5]], torch.randn(2, H, dtype=torch.float64), None)
    assert chains[0] == [] and len(chains[1]) == K


def test_fewer_guesses_are_the_first_heads_and_more_are_refused(exported, runner) -> None:
    _, module = exported(draft=DRAFT)
    states = torch.randn(1, H, dtype=torch.float64)
    three, two = (module.MedusaHeads(vllm_config(guesses)) for guesses in (3, 2))
    assert ask(two, runner, [[5]], states, None)[0] == ask(three, runner, [[5]], states, None)[0][:2]
    with pytest.raises(ValueError, match=r"num_speculative_tokens must be in 1\.\.3, one a head, got 4"):
        module.MedusaHeads(vllm_config(4))


def test_where_the_target_gives_no_logits_there_are_no_guesses(exported, runner) -> None:
    """Spread over processes, vLLM may gather logits in the first one alone."""
    _, module = exported()
    proposer = module.MedusaHeads(vllm_config())
    proposer.load_model(SimpleNamespace(compute_logits=lambda h: None))
    assert ask(proposer, runner, [[5], [6]], torch.randn(2, H, dtype=torch.float64), None) == [[], []]


def test_other_drafters_are_asked_as_before_and_wrapping_is_done_once(exported, runner) -> None:
    _, module = exported(draft=DRAFT)
    module.MedusaHeads(vllm_config())
    wrapped = runner.propose_draft_token_ids
    module.MedusaHeads(vllm_config())
    assert runner.propose_draft_token_ids is wrapped
    other = SimpleNamespace(propose=lambda tokens, *args, **kwargs: [[1, 2]])  # that has no `see`
    assert ask(other, runner, [[5]], torch.randn(1, H), None) == [[1, 2]]


def test_the_copied_file_needs_nothing_of_this_library(exported, tmp_path: Path) -> None:
    exported(draft=DRAFT)
    assert (tmp_path / "out" / "vllm_proposer.py").read_text() == Path(vllm_proposer.__file__).read_text()
    program = "import sys, vllm_proposer; assert not any(name.startswith('medusa_spec') for name in sys.modules)"
    subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, '.'); {program}"],
        cwd=tmp_path / "out",
        check=True,
    )
