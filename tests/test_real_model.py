"""The main job on the real model: SmolLM2-135M-Instruct says with trees what it says without."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_spec import MedusaModel
from medusa_spec.checkpoint import packaged_heads
from medusa_spec.excuse import explain
from medusa_spec.prompts import encode, packaged_prompts, read_prompts

pytestmark = pytest.mark.real

NEW = 32
EXCUSES_PER_TOKEN = 1e-4


@pytest.fixture(scope="module")
def tokenizer(real_model_path):
    return AutoTokenizer.from_pretrained(real_model_path)


def test_float32_output_is_the_target_s_over_all_packaged_prompts(real_model_path, tokenizer):
    target = AutoModelForCausalLM.from_pretrained(real_model_path, dtype=torch.float32).eval()
    prompts = read_prompts(packaged_prompts())
    assert len(prompts) >= 50
    plain = []
    for prompt in prompts:
        inputs = encode(tokenizer, prompt.messages)
        out = target.generate(**inputs, do_sample=False, max_new_tokens=NEW)
        plain.append((inputs, out[0, inputs["input_ids"].shape[1] :].tolist()))
    model = MedusaModel(target, "smollm2-135m")
    excused = tokens = accepted = 0
    for inputs, expected in plain:
        out = model.generate(**inputs, do_sample=False, max_new_tokens=NEW)
        drafted = out[0, inputs["input_ids"].shape[1] :].tolist()
        difference = explain(target, inputs["input_ids"], expected, drafted)
        assert difference is None or difference.excused, difference
        excused += difference is not None
        tokens += len(expected)
        accepted += model.last_stats.accepted
    assert excused <= EXCUSES_PER_TOKEN * tokens
    assert accepted > 0.2 * tokens  # the heads did draft


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m-gsm8k"])
def test_packaged_heads_accept_on_the_model_as_it_ships(real_model_path, tokenizer, name):
    assert name in packaged_heads()
    model = MedusaModel.from_pretrained(real_model_path, heads=name)
    maths = [prompt for prompt in read_prompts(packaged_prompts()) if prompt.category == "maths"][:3]
    mu = []
    for prompt in maths:
        model.generate(**encode(tokenizer, prompt.messages), do_sample=False, max_new_tokens=64)
        mu.append(model.last_stats.mu)
    assert min(mu) > 0.3


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_in_bfloat16_trees_give_what_plain_decoding_gives_with_no_excuse(real_model_path, tokenizer, sampled):
    """A tree pass of the prepared target has the bits of one-token passes, so rounding has nothing to tip."""
    model = MedusaModel.from_pretrained(real_model_path, heads="smollm2-135m", dtype=torch.bfloat16)
    if not model.backbone.reads_chains:
        pytest.skip(f"not prepared as a whole on this machine: {model.prepared.reason}")
    settings = {"max_new_tokens": 64, "do_sample": sampled, **({"temperature": 0.8} if sampled else {})}
    accepted = 0
    for prompt in read_prompts(packaged_prompts())[::10]:
        texts = []
        for draft_nodes in (0, 3, 13, None):
            torch.manual_seed(5)
            texts.append(model.generate(**encode(tokenizer, prompt.messages), draft_nodes=draft_nodes, **settings))
            accepted += model.last_stats.accepted
        assert all(torch.equal(text, texts[0]) for text in texts), prompt.category
    assert accepted > 100


def test_the_same_seed_gives_the_same_text_as_plain_sampling(real_model_path, tokenizer):
    model = MedusaModel.from_pretrained(real_model_path, heads="smollm2-135m", dtype=torch.float32)
    inputs = encode(tokenizer, read_prompts(packaged_prompts(), limit=1)[0].messages)
    settings = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 24}
    torch.manual_seed(11)
    drafted = model.generate(**inputs, **settings)
    torch.manual_seed(11)
    assert torch.equal(drafted, model.target.generate(**inputs, **settings))
