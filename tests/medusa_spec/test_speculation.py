"""Whatever is decided, the target's tokens come out; and what was decided can be seen."""

import copy
import gc
import pickle
from dataclasses import dataclass

import pytest
import torch

from medusa_spec import HybridDrafter, MedusaModel, NgramDrafter, pass_times, speculation
from medusa_spec.errors import ConfigError
from medusa_spec.pass_times import PassTimes
from medusa_spec.speculation import Speculation
from medusa_spec.testing import tiny

FAST = PassTimes({16: {1: 1.0, 64: 1.0}})


@pytest.fixture
def timed(monkeypatch):
    """T(N) of a machine where nodes are free."""
    monkeypatch.setattr(speculation, "pass_times", lambda backbone, prepared: copy.deepcopy(FAST))


def wrapped(**given):
    return MedusaModel(tiny("llama"), **{"drafter": "ngram", "speculation": "auto", **given})


def prompt(length=24):
    return torch.arange(1, 1 + length)[None] % 7 + 3


@pytest.mark.parametrize("drafter", ["heads", "ngram"])
@pytest.mark.parametrize("sampled", [False, True])
def test_the_tokens_are_the_target_s_whatever_the_clock_says(drafter, sampled):
    model = wrapped(drafter=drafter)
    given = {"max_new_tokens": 60, "do_sample": sampled, **({"temperature": 0.8} if sampled else {})}
    for seed in range(3):
        torch.manual_seed(seed)
        expected = model.target.generate(prompt(), **given)
        torch.manual_seed(seed)
        assert torch.equal(model.generate(prompt(), **given), expected)


def test_decisions_are_returned(timed):
    model = wrapped(drafter="heads")
    out = model.generate(prompt(), max_new_tokens=40, do_sample=False, return_dict_in_generate=True)
    assert out.stats.decisions[0].token == 1 and out.stats.decisions[0].drafting
    assert len(out.stats.nodes) == out.stats.passes == sum(out.stats.pass_sizes.values())


def test_drafts_that_bring_nothing_are_given_up_and_it_is_said(monkeypatch):
    """A pass over two nodes takes ten times as long as one."""
    dear = PassTimes({16: {1: 1e-3, 2: 1e-2, 64: 1e-1}})
    monkeypatch.setattr(speculation, "pass_times", lambda backbone, prepared: dear)
    monkeypatch.setattr(dear, "observe", lambda *given: None)
    model = wrapped(drafter="heads")
    laps = iter(range(1_000_000))
    monkeypatch.setattr("medusa_spec.decoding.perf_counter", lambda: next(laps) * 5e-3)
    model.generate(prompt(), max_new_tokens=60, do_sample=False)
    assert model.last_stats.nodes.count(1) > 20
    assert not model.last_stats.decisions[1].drafting


def test_fixed_is_what_it_was(timed):
    model = wrapped(drafter="heads")
    sizes = []
    for mode in ("fixed", "fixed"):
        model.generate(prompt(), max_new_tokens=30, do_sample=False, speculation=mode)
        sizes.append(model.last_stats.nodes)
        assert model.last_stats.decisions == []
    assert sizes[0] == sizes[1] and set(sizes[0]) == {5}


def test_plain_decoding_asks_nobody(timed):
    model = wrapped()
    model.generate(prompt(), max_new_tokens=10, do_sample=False, draft_nodes=0)
    assert model.last_stats.decisions == [] and set(model.last_stats.nodes) == {1}


def test_a_limit_that_was_asked_for_is_kept(timed):
    model = wrapped(drafter="heads")
    model.generate(prompt(), max_new_tokens=30, do_sample=False, draft_nodes=2)
    assert max(model.last_stats.nodes) <= 3


@pytest.mark.parametrize("where", ["wrap", "call"])
def test_an_unknown_mode_is_refused_by_name(where, timed):
    with pytest.raises(ConfigError, match="speculation must be one of .*'auto', 'fixed'.* got 'maybe'"):
        if where == "wrap":
            wrapped(speculation="maybe")
        else:
            wrapped().generate(prompt(), max_new_tokens=4, speculation="maybe")


def test_look_up_goes_on_where_drafts_of_heads_do_not_pay(timed):
    model = wrapped(drafter="heads")
    expected = model.target.generate(prompt(40), max_new_tokens=60, do_sample=False)
    for wait in (10_000, 0):
        hybrid = HybridDrafter(model.drafter)
        model.speculation.known(hybrid, 0.0).wait = wait
        out = model.generate(prompt(40), max_new_tokens=60, do_sample=False, drafter=hybrid)
        assert torch.equal(out, expected) and max(model.last_stats.nodes) > 1  # the tiny model repeats itself


def test_what_was_learnt_is_kept_by_drafter_and_temperature(timed):
    model, ngram = wrapped(), NgramDrafter()
    memory = model.speculation
    for drafter, temperature in ((model.drafter, 0.0), (ngram, 0.0), (ngram, 0.7), (ngram, 0.72), (ngram, 1.5)):
        memory.controllers(model.backbone, drafter, limit=None, temperature=temperature)(1)
    assert [len(known) for known in memory._known.values()] == [1, 3]
    assert memory.known(ngram, 0.7) is memory.known(ngram, 0.72) is not memory.known(model.drafter, 0.7)


def test_a_drafter_that_is_gone_is_forgotten_and_needs_no_hash(timed):
    @dataclass
    class Unhashable(NgramDrafter):
        size: int = 1

        def __post_init__(self):
            NgramDrafter.__init__(self)

    memory, drafter = wrapped().speculation, Unhashable()
    before = len(memory._known)
    memory.known(drafter, 0.0)
    assert len(memory._known) == before + 1
    del drafter
    gc.collect()
    assert len(memory._known) == before


def test_a_model_that_cannot_be_timed_decodes_as_fixed(monkeypatch):
    def fail(backbone, prepared):
        raise RuntimeError("no clock")

    said = []
    monkeypatch.setattr(speculation, "pass_times", fail)
    monkeypatch.setattr(speculation.logger, "warning", said.append)
    model = wrapped(drafter="heads")
    model.generate(prompt(), max_new_tokens=8, do_sample=False)
    assert model.last_stats.decisions == [] and len(said) == 1 and "no clock" in said[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_wrapped_again_is_not_timed_again(dtype, tmp_path, monkeypatch):
    """Preparing tells measured times in words; they are no part of what T(N) is kept by."""
    monkeypatch.setattr(pass_times, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(pass_times, "PREFIXES", (16,))
    monkeypatch.setattr("medusa_spec.prepare.WORTH_IT", 0.0)  # whether it is worth it is measured, too
    for _ in range(3):
        MedusaModel(tiny("llama").to(dtype), drafter="ngram", speculation="auto").detach()
    assert len(list((tmp_path / "pass-times").iterdir())) == 1


def test_copies_learn_anew():
    for made in (copy.deepcopy(Speculation("auto", "x")), pickle.loads(pickle.dumps(Speculation("auto", "x")))):
        assert (made.mode, made.prepared, made._known) == ("auto", "x", {})
