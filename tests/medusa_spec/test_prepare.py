"""Preparing a target changes its speed and nothing else, and can be taken back."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from medusa_spec import MedusaModel
from medusa_spec import prepare as prepare_module
from medusa_spec.excuse import explain
from medusa_spec.native.build import library
from medusa_spec.prepare import prepare
from medusa_spec.prepared.packed_layer import FrozenPackedLinear, KeptDenseLinear
from medusa_spec.prepared.packed_linear import available

pytestmark = pytest.mark.skipif(not available(), reason=f"no kernel on this machine: {library().reason}")


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch):
    """Tiny layers gain nothing; what is tested here is that they stay right."""
    monkeypatch.setattr(prepare_module, "WORTH_IT", 0.0)


@pytest.fixture(params=["llama", "qwen3", "mistral-window", "gemma3", "gpt-neox", "phi3", "mixtral", "gpt-oss"])
def bf16(request, make_model):
    return make_model(request.param, dtype=torch.bfloat16).requires_grad_(False)


@torch.no_grad()
def test_a_prepared_model_gives_the_same_logits_up_to_rounding(bf16, prompt):
    ids = prompt(20)
    before = bf16(ids).logits.float()
    exact = copy.deepcopy(bf16).double()(ids).logits.float()
    prepared = prepare(bf16)
    assert prepared.layers
    after = bf16(ids).logits.float()
    assert not torch.equal(after, torch.zeros_like(after))
    # no further from the exact logits than bfloat16 was before
    assert (after - exact).abs().mean() < 1.3 * (before - exact).abs().mean()
    prepared.undo()
    assert torch.equal(bf16(ids).logits.float(), before)


def test_the_law_with_the_excuse_of_rounding_holds_on_prepared_models(bf16, scripted, prompt):
    ids = prompt(9)
    plain = bf16.generate(ids, do_sample=False, max_new_tokens=24)[0].tolist()
    model = MedusaModel(bf16, drafter=scripted(plain, right=0.8))
    assert model.prepared.layers
    drafted = model.generate(ids, do_sample=False, max_new_tokens=24)[0].tolist()
    model.detach()
    difference = explain(bf16, ids, plain[9:], drafted[9:])
    assert difference is None or difference.excused


def test_state_and_parameters_stay_as_they_were(bf16):
    before = {name: tensor.clone() for name, tensor in bf16.state_dict().items()}
    identities = {name: id(parameter) for name, parameter in bf16.named_parameters()}
    prepared = prepare(bf16, bf16.get_output_embeddings())
    assert prepared.layers
    state = bf16.state_dict()
    assert list(state) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())
    prepared.undo()
    prepared.undo()
    assert not any(isinstance(module, FrozenPackedLinear | KeptDenseLinear) for module in bf16.modules())
    assert {name: id(parameter) for name, parameter in bf16.named_parameters()} == identities
    assert all(torch.equal(parameter, before[name]) for name, parameter in bf16.named_parameters())


def test_a_prepared_model_is_saved_as_it_was(bf16, tmp_path):
    before = {name: tensor.clone() for name, tensor in bf16.state_dict().items()}
    prepare(bf16, bf16.get_output_embeddings())
    bf16.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in before.items())


def test_packing_takes_no_memory_but_for_weights_that_others_read(make_model):
    untied = make_model("llama", dtype=torch.bfloat16).requires_grad_(False)
    head = untied.lm_head
    prepared = prepare(untied, head)
    assert prepared.extra_bytes == head.packed.packed.numel() * 2
    held = sum(p.untyped_storage().nbytes() for p in untied.parameters() if p is not head.weight)
    assert held < 0.2 * sum(p.numel() * 2 for p in untied.parameters())  # embeddings and norms alone


def test_tied_weights_keep_their_dense_tensor(make_model, prompt):
    model = make_model("gemma3", dtype=torch.bfloat16).requires_grad_(False)
    model.tie_weights()
    embedding = model.get_input_embeddings().weight
    assert model.lm_head.weight is embedding
    prepare(model)
    assert isinstance(model.lm_head, KeptDenseLinear)
    assert model.lm_head.weight is embedding
    assert embedding.isfinite().all()


def test_an_adapter_runs_over_prepared_layers_and_cannot_be_merged_behind_their_back(make_model, prompt):
    ids = prompt(8)
    model = make_model("llama", dtype=torch.bfloat16)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    with torch.no_grad():
        apart = adapted(ids).logits
        model.requires_grad_(False)
        prepared = prepare(model)
        torch.testing.assert_close(adapted(ids).logits, apart, rtol=0.05, atol=0.05)
        with pytest.raises(RuntimeError):  # loud, where packed weights would have missed it in silence
            adapted.merge_adapter()
        prepared.undo()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_left_alone(make_model, dtype):
    prepared = prepare(make_model("llama", dtype=dtype).requires_grad_(False))
    assert not prepared.layers
    assert prepared.reason.startswith("not prepared")


def test_hooked_layers_are_left_alone():
    model = nn.Sequential(nn.Linear(8, 8)).bfloat16().requires_grad_(False)
    own = model[0].forward
    model[0].forward = own
    assert not prepare(model).layers
    assert model[0].__dict__["forward"] is own


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("available", lambda: False, "not prepared"), ("WORTH_IT", 1e9, "only")],
)
def test_why_nothing_was_done_is_said(make_model, monkeypatch, name, value, words):
    monkeypatch.setattr(prepare_module, name, value)
    prepared = prepare(make_model("llama", dtype=torch.bfloat16).requires_grad_(False))
    assert not prepared.layers
    assert words in prepared.reason


def test_detach_takes_the_preparation_back(make_model):
    model = make_model("llama", dtype=torch.bfloat16)
    wrapped = MedusaModel(model)
    assert wrapped.prepared.layers
    wrapped.detach()
    assert not any(isinstance(module, FrozenPackedLinear | KeptDenseLinear) for module in model.modules())


def test_preparation_can_be_declined(make_model):
    assert not MedusaModel(make_model("llama", dtype=torch.bfloat16), prepare=False).prepared.layers


def test_an_interrupted_preparation_gives_the_model_back(make_model, monkeypatch):
    model = make_model("llama", dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pack, left = prepare_module.pack_layer, [4]

    def interrupted(*args, **kwargs):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return pack(*args, **kwargs)

    monkeypatch.setattr(prepare_module, "pack_layer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        MedusaModel(model, probe=False)
    assert left == [0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any("packed" in module.__dict__ for module in model.modules())
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {nn.Linear}


def test_a_gate_of_one_output_survives(prompt):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen2MoeConfig(
        vocab_size=128, intermediate_size=48, shared_expert_intermediate_size=16, **sizes, **experts
    )
    model = AutoModelForCausalLM.from_config(config).bfloat16().eval()
    assert model.model.layers[0].mlp.shared_expert_gate.out_features == 1
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrapped = MedusaModel(model, drafter="ngram")
    assert wrapped.prepared.layers and model(prompt(9)).logits.isfinite().all()
    wrapped.detach()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_a_lost_wrapper_left_packed_is_packed_anew_and_given_back(make_model):
    model = make_model("llama", dtype=torch.bfloat16).requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lost = len(prepare(model).layers)  # its record is dropped
    prepared = prepare(model)
    assert len(prepared.layers) == lost
    prepared.undo()
    assert not any(isinstance(module, FrozenPackedLinear | KeptDenseLinear) for module in model.modules())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
