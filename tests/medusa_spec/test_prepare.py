"""Preparing a target changes its speed and nothing else, and can be taken back."""

import copy
import gc
import pickle
import resource
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

from medusa_spec import MedusaModel
from medusa_spec import prepare as prepare_module
from medusa_spec.excuse import explain
from medusa_spec.native.build import library
from medusa_spec.prepare import prepare
from medusa_spec.prepared.decoder_layer import FastDecoderLayer
from medusa_spec.prepared.norm import FastNorm
from medusa_spec.prepared.packed_layer import FrozenPackedLinear, KeptDenseLinear
from medusa_spec.prepared.packed_linear import available
from medusa_spec.prepared.swap import Swapped

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


# --- whole models -----------------------------------------------------------------------------------------------------

DTYPES = (torch.bfloat16, torch.float32)
ALL_OVER = ("llama", "qwen2", "qwen3", "mistral")
KERNELS_ALL_OVER = (*ALL_OVER, "gemma2", "gemma3_text", "granite")
"""Architectures without a product, norm or softmax that is left to torch."""
MIXTURES = ("mixtral", "gpt_oss")

WIDE_NAMES = (
    *KERNELS_ALL_OVER,
    *(
        "gpt2",
        "gpt_neox",
        "phi",
        "phi3",
        "mixtral",
        "gpt_oss",
        "olmo",
        "olmo2",
        "starcoder2",
        "cohere",
        "exaone4",
        "smollm3",
    ),
)


def errors(before, after, exact):
    """Mean distances of two results from the exact one."""
    return ((result.double() - exact).abs().mean() for result in (before, after))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WIDE_NAMES)
@torch.no_grad()
def test_every_architecture_stays_as_exact_as_it_was(make_wide, passes, random_tree, prompt, name, dtype):
    model, ids, tree = make_wide(name, dtype=dtype), prompt(20), random_tree(12)

    def results(model):
        with passes(model, ids) as run:
            return model(ids).logits[0], run.tree(*tree)

    before, exact = results(model), results(copy.deepcopy(model).double())
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    prepared = prepare(model, model.get_output_embeddings())
    assert prepared.layers
    assert set(prepared.modules) == {module for module in model.modules() if isinstance(module, Swapped)}
    for old, new, true in zip(before, results(model), exact, strict=True):
        was, now = errors(old, new, true)
        # a rounding may send a token to another expert
        assert now < (3.0 if name in MIXTURES and dtype == torch.bfloat16 else 1.3) * was + 1e-12
    prepared.undo()
    assert not any(isinstance(module, Swapped | FrozenPackedLinear | KeptDenseLinear) for module in model.modules())
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    assert all(torch.equal(*pair) for pair in zip(results(model), before, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KERNELS_ALL_OVER)
def test_a_tree_pass_gives_the_bits_of_one_token_passes(make_wide, passes, random_tree, prompt, name, dtype):
    model = make_wide(name, dtype=dtype)
    prepare(model, model.get_output_embeddings())
    for nodes, length in ((1, 1), (5, 3), (17, 20), (40, 7), (70, 60)):
        parents, tokens = random_tree(nodes, seed=nodes)
        with passes(model, prompt(length)) as run:
            assert torch.equal(run.tree(parents, tokens), run.paths(parents, tokens))


@given(nodes=st.integers(1, 24), length=st.integers(1, 30), threads=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_trees_prefixes_and_threads_do_not_change_a_bit(
    fully_prepared, make_wide, passes, random_tree, prompt, name, dtype, nodes, length, threads, seed
):
    model = fully_prepared(make_wide, name, dtype)
    parents, tokens = random_tree(nodes, seed)
    own = torch.get_num_threads()
    try:
        with passes(model, prompt(length, seed)) as run:
            one_by_one = run.paths(parents, tokens)
            torch.set_num_threads(threads)
            assert torch.equal(run.tree(parents, tokens), one_by_one)
    finally:
        torch.set_num_threads(own)


@pytest.fixture(scope="module")
def fully_prepared():
    """`fully_prepared(make_wide, name, dtype)`: made once."""
    made = {}

    def get(make_wide, name, dtype):
        if (name, dtype) not in made:
            model = make_wide(name, dtype=dtype)
            prepare(model, model.get_output_embeddings())
            made[name, dtype] = model
        return made[name, dtype]

    return get


@pytest.mark.parametrize("name", ALL_OVER)
def test_whole_decoder_layers_are_found_in_the_usual_models(make_wide, name):
    model = make_wide(name, dtype=torch.bfloat16)
    prepared = prepare(model, model.get_output_embeddings())
    assert all(isinstance(layer, FastDecoderLayer) and layer in prepared.modules for layer in model.model.layers)
    assert isinstance(model.model.norm, FastNorm)
    assert str(len(prepared.modules)) in prepared.reason


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_prefix_is_one_too_many(make_wide, passes, random_tree, dtype):
    """Slabs grow and kernels change at some of these lengths; the law holds on both sides."""
    model = make_wide("llama", dtype=dtype, max_position_embeddings=16384)
    prepare(model, model.get_output_embeddings())
    ids = torch.randint(2, 128, (1, 8192), generator=torch.Generator().manual_seed(0))
    parents, tokens = random_tree(6)
    for length in (1, 2, 63, 64, 65, 1000, 2047, 2048, 4096, 8192):
        with passes(model, ids[:, :length], reserve=1) as run:
            assert torch.equal(run.tree(parents, tokens), run.paths(parents, tokens)), length


def test_sliding_slabs_may_slide(make_wide, scripted, prompt):
    """Decoding far beyond the window, where the slab moves its window back to the front again and again."""
    model = make_wide("mistral", dtype=torch.bfloat16)
    wrapped = MedusaModel(model, drafter="ngram")
    assert any(isinstance(module, FastDecoderLayer) for module in model.modules())
    plain = wrapped.generate(prompt(9), do_sample=False, max_new_tokens=300, draft_nodes=0)
    drafter = scripted(plain[0].tolist(), right=0.8)
    assert torch.equal(wrapped.generate(prompt(9), do_sample=False, max_new_tokens=300, drafter=drafter), plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL_OVER)
def test_greedy_equals_one_token_decoding_with_no_excuse(make_wide, scripted, prompt, name, dtype):
    model = MedusaModel(make_wide(name, dtype=dtype), drafter="ngram")
    plain = model.generate(prompt(9), do_sample=False, max_new_tokens=100, draft_nodes=0)
    drafter = scripted(plain[0].tolist(), right=0.8)
    assert torch.equal(model.generate(prompt(9), do_sample=False, max_new_tokens=100, drafter=drafter), plain)


def test_decoding_does_not_grow(make_wide, prompt):
    """Ten thousand steps, many short texts and one long, leave no tensor and no memory behind."""
    model = MedusaModel(make_wide("llama", dtype=torch.bfloat16, num_hidden_layers=1, max_position_embeddings=8192))
    arguments = {"do_sample": False, "draft_nodes": 0, "pad_token_id": 0}

    def state():
        gc.collect()
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
        return tensors, pages * resource.getpagesize()

    def decode(texts, tokens):
        for seed in range(texts):
            model.generate(prompt(9, seed), max_new_tokens=tokens, **arguments)

    decode(3, 300)
    decode(1, 2500)
    tensors, memory = state()
    decode(25, 300)
    decode(1, 2500)
    after, memory_after = state()
    assert after <= tensors + 5
    assert memory_after - memory < 32 * 2**20


# --- odd models -------------------------------------------------------------------------------------------------------


def test_float64_is_left_alone_all_over(make_wide):
    model = make_wide("llama", dtype=torch.float64)
    kinds = [type(module) for module in model.modules()]
    assert not prepare(model).modules
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize("path", ["mlp", "self_attn", "self_attn.q_proj", "mlp.up_proj", "input_layernorm"])
@torch.no_grad()
def test_layers_may_share_a_module(make_wide, prompt, path):
    model, ids = make_wide("llama", dtype=torch.float32), prompt(12)
    parent, _, name = path.rpartition(".")
    setattr(model.model.layers[1].get_submodule(parent), name, model.model.layers[0].get_submodule(path))
    before = model(ids, use_cache=False).logits
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    prepared = prepare(model, model.get_output_embeddings())
    torch.testing.assert_close(model(ids, use_cache=False).logits, before, rtol=1e-4, atol=1e-4)
    prepared.undo()
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@torch.no_grad()
def test_weights_that_are_not_finite_stay_so(make_wide, prompt, value):
    model, ids = make_wide("qwen3", dtype=torch.bfloat16), prompt(12)
    layer = model.model.layers[1]
    for weight in (layer.self_attn.k_proj.weight, layer.self_attn.q_norm.weight, layer.mlp.up_proj.weight):
        weight.view(-1)[3] = value
    before = model(ids).logits
    state = {key: tensor.clone().view(torch.int16) for key, tensor in model.state_dict().items()}
    prepared = prepare(model, model.get_output_embeddings())
    assert torch.equal(model(ids).logits.isfinite(), before.isfinite())
    prepared.undo()
    assert all(torch.equal(tensor.view(torch.int16), state[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_of_a_prepared_model_decode_and_are_plain(make_wide, prompt, duplicate):
    model = MedusaModel(make_wide("qwen3", dtype=torch.bfloat16), drafter="ngram")
    expected = model.generate(prompt(9), do_sample=False, max_new_tokens=40)
    other = duplicate(model)
    assert not any(isinstance(module, Swapped | FrozenPackedLinear | KeptDenseLinear) for module in other.modules())
    own, theirs = model.target.state_dict(), other.target.state_dict()
    assert all(torch.equal(own[key], tensor) for key, tensor in theirs.items())
    difference = explain(
        copy.deepcopy(other).detach(),
        prompt(9),
        expected[0, 9:].tolist(),
        other.generate(prompt(9), do_sample=False, max_new_tokens=40)[0, 9:].tolist(),
    )
    assert difference is None or difference.excused
    other.detach()
    assert torch.equal(model.generate(prompt(9), do_sample=False, max_new_tokens=40), expected)


def test_a_prepared_model_can_be_run_without_memory(make_wide):
    model = make_wide("llama", dtype=torch.float32)
    prepare(model, model.get_output_embeddings())
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.zeros(1, 4, dtype=torch.long)).logits.shape == (1, 4, 128)


def test_a_prepared_model_can_be_compiled(make_wide, prompt):
    """Whoever traces it sees torch's operations."""
    model, ids = make_wide("llama", dtype=torch.float32), prompt(12)
    before = model(ids).logits
    prepare(model)
    torch.testing.assert_close(torch.compile(model, backend="eager")(ids).logits, before, rtol=1e-4, atol=1e-4)


def test_offloading_hooks_are_respected(make_wide, prompt):
    plain = make_wide("llama", dtype=torch.float32)
    before = plain(prompt(12)).logits
    model = cpu_offload(copy.deepcopy(plain), execution_device="cpu")
    prepared = prepare(model)
    assert not prepared.layers and not prepared.modules
    assert torch.equal(model(prompt(12)).logits, before)
    model = copy.deepcopy(plain)
    prepare(model)
    add_hook_to_module(model.model.layers[1].mlp, Larger())
    add_hook_to_module(plain.model.layers[1].mlp, Larger())
    torch.testing.assert_close(model(prompt(12)).logits, plain(prompt(12)).logits, rtol=1e-4, atol=1e-4)


class Larger(ModelHook):
    """A hook that shows."""

    def post_forward(self, module, output):
        return output * 1.5
