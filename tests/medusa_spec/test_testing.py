from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_spec.errors import ConfigError
from medusa_spec.testing import ARCHITECTURES, save_tiny_model, tiny, tiny_model, tiny_tokenizer

TEXT = "Grüße, 你好!\n  def f(x): return x"


def test_tokenizer_gives_the_text_back() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT


def test_equal_seeds_give_equal_models_and_leave_the_global_seed_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, other, third = tiny_model(seed=1), tiny_model(seed=1), tiny_model(seed=2)
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(left, right) for left, right in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, third.lm_head.weight)


def test_saved_model_and_tokenizer_are_those_that_were_made(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float64
    messages = [{"role": "user", "content": TEXT}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    assert tokenizer.decode(ids[0]) == (f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, tiny_model()(ids).logits)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_made_and_depends_on_all_its_context(name: str) -> None:
    model = tiny(name)
    assert model.dtype == torch.float64 and model.config.model_type == name
    ids = torch.randint(3, 128, (1, 6))
    changed = ids.clone()
    changed[0, 0] = 3 + (ids[0, 0] - 2) % 125
    with torch.no_grad():
        one, other = model(ids).logits[0, -1], model(changed).logits[0, -1]
    assert not torch.allclose(one, other)


def test_unknown_architecture_is_named() -> None:
    with pytest.raises(ConfigError, match="perceptron"):
        tiny("perceptron")
