"""Every example runs, on a tiny model; what it shows off is checked."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

import medusa_spec
from medusa_spec import MedusaModel
from medusa_spec.testing import save_tiny_model

EXAMPLES = Path(__file__).parent.parent / "examples"
TESTED = {
    "domain_adapters",
    "finetune_heads",
    "ngram_no_training",
    "sampling_same_seed",
    "streaming",
    "wrap_and_generate",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return save_tiny_model(tmp_path_factory.mktemp("examples") / "model")


def _example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TESTED


def test_trained_heads_give_the_models_own_tokens(folder: Path, tmp_path: Path) -> None:
    MedusaModel.from_pretrained(folder).save_pretrained(tmp_path / "heads")
    drafted, plain = _example("wrap_and_generate").main(str(folder), str(tmp_path / "heads"))
    assert drafted == plain


def test_ngrams_give_the_models_own_tokens_and_leave_it_as_it_was(folder: Path) -> None:
    drafted, plain = _example("ngram_no_training").main(str(folder))
    assert drafted == plain


def test_streamed_text_is_the_decoded_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _example("streaming").main(str(folder), "abcabc")
    streamed = capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = MedusaModel.from_pretrained(folder, drafter="ngram")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "abcabc"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=128, do_sample=False, draft_nodes=0)
    new = output[0, inputs["input_ids"].shape[1] :]
    assert streamed == tokenizer.decode(new, skip_special_tokens=True) + "\n"


def test_same_seed_gives_the_same_sample(folder: Path) -> None:
    pairs = _example("sampling_same_seed").main(str(folder))
    assert all(plain == drafted for plain, drafted in pairs)
    assert len({tuple(plain) for plain, _ in pairs}) > 1


def test_finetuned_heads_load_from_their_folder_alone(folder: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    with chats.open("w") as file:
        for number in range(60):
            turns = [("user", f"Count from {number}."), ("assistant", f"{number} {number + 1} {number + 2}")]
            record = {"messages": [{"role": role, "content": text} for role, text in turns]}
            file.write(json.dumps(record) + "\n")
    settings = {"epochs": 1, "num_heads": 2, "tree_size": 4, "report_prompts": 1, "report_new_tokens": 8}
    output = _example("finetune_heads").main(
        str(folder), str(chats), str(tmp_path / "run"), held_out=0.1, dtype="float32", **settings
    )
    assert (tmp_path / "run" / "heads" / "heads.safetensors").is_file()
    model = MedusaModel.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who are you?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    expected = model.generate(**prompt, max_new_tokens=32, do_sample=False, draft_nodes=0)
    assert output == expected[0].tolist()


def test_adapters_are_swapped_and_the_text_stays(folder: Path, tmp_path: Path) -> None:
    given = {}
    MedusaModel.from_pretrained(folder).save_pretrained(tmp_path / "heads")
    for name in ("maths", "code"):
        model = MedusaModel.from_pretrained(folder, heads=tmp_path / "heads")
        config = LoraConfig(r=2, target_modules=["linear"], init_lora_weights=False)
        get_peft_model(model.heads, config)
        model.save_pretrained(tmp_path / name)
        given[name] = str(tmp_path / name)
    found = _example("domain_adapters").main(str(folder), str(tmp_path / "heads"), **given)
    for domain, by_name in found.items():
        assert set(by_name) == {"maths", "code", "none"}, domain
        assert len({tuple(ids) for ids, _ in by_name.values()}) == 1


def test_examples_use_public_names_only() -> None:
    for path in EXAMPLES.glob("*.py"):
        lines = [line for line in path.read_text().splitlines() if "medusa_spec" in line and "import" in line]
        assert lines and not any("import _" in line or "._" in line for line in lines), path.name
    assert "MedusaModel" in medusa_spec.__all__
