"""The probe lets exact models through and stops the others."""

import pytest
import torch

from medusa_spec import attention
from medusa_spec import probe as probe_module
from medusa_spec.attention import TreePass, tree_attention
from medusa_spec.backbone import Backbone
from medusa_spec.errors import AttachError
from medusa_spec.probe import compare, probe
from medusa_spec.routes import AttentionRoute, MaskRoute
from medusa_spec.tree import chain


@pytest.fixture(autouse=True)
def forget_verdicts(monkeypatch):
    monkeypatch.setattr(probe_module, "_verdicts", {})


def test_every_supported_architecture_passes_with_a_twin(any_model):
    assert probe(Backbone(any_model)).startswith("route: attention interface; twin: exact")


def test_rounding_of_low_precision_is_not_taken_for_a_fault(make_model):
    for dtype in (torch.float32, torch.bfloat16):
        assert "mean error" in probe(Backbone(make_model("llama", dtype=dtype)))


def test_attention_that_forgets_the_tree_is_stopped_by_the_twin(llama, monkeypatch):
    def causal(module, query, key, value, mask=None, *, tree_pass, **kwargs):
        flat = TreePass(shape=chain(tree_pass.shape.size - 1), cache=tree_pass.cache, device=tree_pass.device)
        return tree_attention(module, query, key, value, mask, tree_pass=flat, **kwargs)

    monkeypatch.setattr(attention, "tree_attention", causal)
    monkeypatch.setattr(probe_module, "ROUTES", (AttentionRoute,))
    with pytest.raises(AttachError, match="twin"):
        probe(Backbone(llama))


@pytest.fixture
def no_twin(monkeypatch):
    def fail(model, attention):
        raise TypeError("sizes of its own")

    monkeypatch.setattr(probe_module, "twin", fail)


@pytest.fixture
def wrong_attention(monkeypatch):
    right = tree_attention

    def wrong(*args, **kwargs):
        out, weights = right(*args, **kwargs)
        return out.roll(1, dims=1), weights

    monkeypatch.setattr(attention, "tree_attention", wrong)


def test_a_model_without_a_twin_is_judged_by_itself(llama, no_twin, wrong_attention, monkeypatch):
    monkeypatch.setattr(probe_module, "ROUTES", (AttentionRoute,))
    with pytest.raises(AttachError, match="wrong mask"):
        probe(Backbone(llama))
    monkeypatch.undo()


def test_what_fails_falls_to_the_next_route(llama, wrong_attention):
    backbone = Backbone(llama)
    assert probe(backbone).startswith("route: 4-D mask; twin: exact")
    assert isinstance(backbone.route, MaskRoute)
    assert not llama.config._attn_implementation.startswith("medusa_spec")


def test_without_a_twin_only_routes_that_are_exact_by_construction_are_left(make_model, no_twin, wrong_attention):
    backbone = Backbone(make_model("llama", dtype=torch.float32))
    assert probe(backbone).startswith("route: levels as batch rows; twin: none")


def test_a_model_that_no_route_serves_is_refused_with_every_reason(llama, monkeypatch):
    monkeypatch.setattr(probe_module, "EXACT", 0.0)
    with pytest.raises(
        AttachError, match="LlamaForCausalLM.*full_attention.*attention interface: .*nodes one by one: "
    ):
        probe(Backbone(llama))


def test_the_twin_is_asked_once_per_class(make_model, monkeypatch):
    made = []
    twin = probe_module.twin
    monkeypatch.setattr(probe_module, "twin", lambda *args: made.append(1) or twin(*args))
    for seed in (0, 1):
        probe(Backbone(make_model("llama", seed=seed)))
    assert len(made) == 1


def test_a_wrong_mask_is_far_from_right(llama, prompt):
    verdict = compare(Backbone(llama), prompt(12))
    assert verdict.error < 1e-9 < 1e-3 < verdict.wrong
