"""Whatever way a base was loaded, a tree decodes what it says: dtypes, quantised, dispatched by hooks, adapted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from medusa_spec import MedusaModel
from medusa_spec.excuse import explain

NEW = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose sizes quantisers take."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("base")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(path)
    return path


def load(folder: Path, dtype: torch.dtype, **kwargs: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **kwargs)


def quantised(folder: Path, dtype: torch.dtype, **kwargs: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    return load(folder, dtype, quantization_config=BitsAndBytesConfig(**kwargs), device_map="cpu")


def four_bits(folder: Path, dtype: torch.dtype) -> Any:
    return quantised(folder, dtype, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def adapted(model: Any, layers: list[int] | None = None) -> Any:
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, layers_to_transform=layers
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return peft.get_peft_model(model, config).eval()


def device_map(*on_disk: str) -> dict[str, str]:
    names = [
        "model.embed_tokens",
        "model.rotary_emb",
        *(f"model.layers.{i}" for i in range(3)),
        "model.norm",
        "lm_head",
    ]
    return {name: "disk" if name in on_disk else "cpu" for name in names}


CPU = torch.device("cpu")

EXACT: dict[str, Callable[[Path], Any]] = {
    "float64": lambda folder: load(folder, torch.float64),
    "offloaded to the CPU": lambda folder: accelerate.cpu_offload(load(folder, torch.float64), execution_device=CPU),
    "a device map, layers on the disk": lambda folder: load(
        folder,
        torch.float64,
        device_map=device_map("model.layers.1", "model.layers.2"),
        offload_folder=str(folder / "layers"),
    ),
    "a device map, LM head on the disk": lambda folder: load(
        folder, torch.float64, device_map=device_map("model.norm", "lm_head"), offload_folder=str(folder / "head")
    ),
    "adapted": lambda folder: adapted(load(folder, torch.float64)),
    "adapted and dispatched": lambda folder: adapted(
        load(folder, torch.float64, device_map=device_map("model.layers.1"), offload_folder=str(folder / "adapted")),
        layers=[0, 2],
    ),
}
"""Bases in float64, by how they came."""

ROUNDED: dict[str, Callable[[Path], Any]] = {
    "float32": lambda folder: load(folder, torch.float32),
    "bfloat16": lambda folder: load(folder, torch.bfloat16),
    "float16": lambda folder: load(folder, torch.float16),
    "four bits": lambda folder: four_bits(folder, torch.float32),
    "eight bits": lambda folder: quantised(folder, torch.float32, load_in_8bit=True, llm_int8_threshold=0.0),
    "four bits, adapted": lambda folder: adapted(four_bits(folder, torch.float32)),
    "eight bits, adapted": lambda folder: adapted(
        quantised(folder, torch.float32, load_in_8bit=True, llm_int8_threshold=0.0)
    ),
}
"""Bases below it."""


def with_config(model: Any) -> Any:
    inner = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    inner.generation_config = GenerationConfig(pad_token_id=0)
    return model


def wrapped(base: Any, answer: torch.Tensor, scripted: Any) -> MedusaModel:
    return MedusaModel(base, drafter=scripted(answer[0].tolist(), right=0.9, lone=0.0))


@pytest.mark.parametrize("name", EXACT)
def test_a_tree_says_what_the_base_says(folder, scripted, prompt, name):
    base, ids = with_config(EXACT[name](folder)), prompt(9)
    answer = base.generate(input_ids=ids, do_sample=False, max_new_tokens=NEW)
    torch.manual_seed(3)
    sampled = base.generate(input_ids=ids, do_sample=True, max_new_tokens=NEW)
    model = wrapped(base, answer, scripted)
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW), answer)
    assert model.last_stats.accepted > 0
    torch.manual_seed(3)
    assert torch.equal(model.generate(ids, do_sample=True, max_new_tokens=NEW), sampled)
    more = {"do_sample": False, "max_new_tokens": 6, "return_dict_in_generate": True, "output_hidden_states": True}
    ours, theirs = model.generate(ids, **more), base.generate(input_ids=ids, **more)
    torch.testing.assert_close(ours.hidden_states, theirs.hidden_states)
    model.detach()
    assert torch.equal(base.generate(input_ids=ids, do_sample=False, max_new_tokens=NEW), answer)


def test_untrained_heads_draft_for_dispatched_and_adapted_bases(folder, prompt):
    for name in ("a device map, LM head on the disk", "adapted and dispatched"):
        base, ids = with_config(EXACT[name](folder)), prompt(9)
        answer = base.generate(input_ids=ids, do_sample=False, max_new_tokens=NEW)
        model = MedusaModel(base, probe=False)
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW), answer)
        assert model.last_stats.drafted_passes > 0


@pytest.mark.parametrize("name", ROUNDED)
def test_below_float64_a_difference_is_one_that_rounding_explains(folder, scripted, prompt, name):
    base, ids = with_config(ROUNDED[name](folder)), prompt(9)
    answer = base.generate(input_ids=ids, do_sample=False, max_new_tokens=NEW)
    model = wrapped(base, answer, scripted)
    drafted = model.generate(ids, do_sample=False, max_new_tokens=NEW)
    assert model.last_stats.accepted > 0
    assert drafted.shape == answer.shape and torch.equal(drafted[:, :9], ids)
    difference = explain(model.target, ids, answer[0, 9:].tolist(), drafted[0, 9:].tolist())
    assert difference is None or difference.excused
    own = model.generate(ids, do_sample=False, max_new_tokens=NEW, draft_nodes=0)
    difference = explain(model.target, ids, own[0, 9:].tolist(), drafted[0, 9:].tolist())
    assert difference is None or difference.excused


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_scores_are_float32_and_states_of_the_base_s_dtype_as_in_plain_decoding(folder, scripted, prompt, dtype):
    base, ids = with_config(load(folder, dtype)), prompt(9)
    settings = {"do_sample": False, "max_new_tokens": 5, "return_dict_in_generate": True}
    settings |= {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    plain = base.generate(ids, **settings)
    model = wrapped(base, plain.sequences, scripted)
    drafted = model.generate(ids, **settings)
    for name in ("scores", "logits"):
        assert {score.dtype for out in (plain, drafted) for score in getattr(out, name)} == {torch.float32}
    for out in (plain, drafted):
        assert {layer.dtype for states in out.hidden_states for layer in states} == {dtype}
        assert {layer.keys.dtype for layer in out.cache.layers} == {dtype}


@pytest.mark.parametrize("wrap", [lambda model: model, adapted], ids=["alone", "adapted"])
def test_eight_bits_with_outliers_are_left_to_the_base_s_own_loop(folder, scripted, prompt, wrap):
    base, ids = with_config(wrap(quantised(folder, torch.float32, load_in_8bit=True))), prompt(9)
    answer = base.generate(input_ids=ids, do_sample=False, max_new_tokens=NEW)
    model = wrapped(base, answer, scripted)
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW), answer)
    assert model.last_stats.accepted == 0 and "llm_int8_threshold=0.0" in model.last_stats.rule
