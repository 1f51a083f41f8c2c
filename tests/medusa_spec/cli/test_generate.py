import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from medusa_spec.chat_template import chat_template_hash
from medusa_spec.checkpoint import save_heads
from medusa_spec.cli import main
from medusa_spec.cli.generate import read_prompt, sampling_arguments
from medusa_spec.config import MedusaConfig
from medusa_spec.drafters import SuffixCorpus
from medusa_spec.errors import ConfigError
from medusa_spec.model import MedusaModel
from medusa_spec.testing import tiny_tokenizer
from medusa_spec.vocabulary import vocabulary_identity

TEXT = "abcabcabcabcabc"


def _run(*arguments: str) -> object:
    with pytest.raises(SystemExit) as stopped:
        main(["generate", *arguments])
    return stopped.value.code


def _expected(folder: Path, **arguments: object) -> str:
    tokenizer = tiny_tokenizer()
    inputs = tokenizer(TEXT, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(7)
    output = model.generate(**inputs, max_new_tokens=40, **arguments)
    new = output[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True))


def test_text_written_is_the_models_own(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--prompt", TEXT, "--max-new-tokens", "40", "--no-chat-template")
    assert _run(str(tiny_folder), *options) == 0
    captured = capsys.readouterr()
    assert captured.out == _expected(tiny_folder, do_sample=False) + "\n"
    assert "n-gram" in captured.err


def test_sampled_text_is_the_models_own_of_the_same_seed(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--drafter ngram --max-new-tokens 40 --no-chat-template --temperature 0.7 --seed 7"
    options += " --top-k 20 --top-p 0.9"
    assert _run(str(tiny_folder), "--prompt", TEXT, *options.split()) == 0
    expected = _expected(tiny_folder, do_sample=True, temperature=0.7, top_k=20, top_p=0.9)
    assert capsys.readouterr().out == expected + "\n"


def test_a_corpus_brings_drafts_and_changes_no_text(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = _expected(tiny_folder, do_sample=False)
    tokenizer = tiny_tokenizer()
    corpus = SuffixCorpus(tmp_path / "corpus", identity=vocabulary_identity(tokenizer))
    corpus.add([tokenizer(TEXT + expected)["input_ids"]])
    options = ["--prompt", TEXT, "--max-new-tokens", "40", "--no-chat-template", "--drafter", "suffix"]
    assert _run(str(tiny_folder), *options, "--corpus", str(corpus.folder)) == 0
    assert capsys.readouterr().out == expected + "\n"
    assert _run(str(tiny_folder), *options, "--corpus", str(tmp_path / "none")) == 2
    assert "medusa-spec corpus add" in capsys.readouterr().err


def test_marks_and_figures_agree_and_the_text_stays_the_same(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--prompt", TEXT, "--max-new-tokens", "40", "--no-chat-template", "--show-accepted")
    assert _run(str(tiny_folder), *options) == 0
    captured = capsys.readouterr()
    text = captured.out.replace("‹", "").replace("›", "")
    assert text == _expected(tiny_folder, do_sample=False) + "\n"
    marked = "‹" in captured.out
    assert marked == ("mu 0.00" not in captured.err)
    assert "passes" in captured.err


def test_prompt_comes_from_argument_file_or_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("from file", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin"))
    assert read_prompt("given", None) == "given"
    assert read_prompt(None, path) == "from file"
    assert read_prompt(None, None) == "from stdin"
    with pytest.raises(ConfigError, match="both"):
        read_prompt("given", path)
    with pytest.raises(ConfigError, match="no file"):
        read_prompt(None, tmp_path / "absent")


def test_temperature_zero_is_greedy_and_anything_above_samples() -> None:
    assert sampling_arguments(0, None, None) == {"do_sample": False}
    assert sampling_arguments(0.5, None, 0.9) == {
        "do_sample": True, "temperature": 0.5, "top_k": 0, "top_p": 0.9,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="temperature"):
        sampling_arguments(-1, None, None)
    with pytest.raises(ConfigError, match="top-k"):
        sampling_arguments(0, 5, None)


def test_missing_model_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(str(tmp_path / "absent"), "--prompt", "x", "--drafter", "ngram") == 2
    error = capsys.readouterr().err
    assert "absent" in error and "Traceback" not in error


def test_a_prompt_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_prompt(None, tmp_path / "prompt.txt")


@pytest.mark.parametrize("name", ["/no/such/folder", "no/such/folder", "no-such-model"])
def test_a_model_that_is_not_there_is_one_message(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(name, "--prompt", "x") == 2
    error = capsys.readouterr().err
    assert f"got '{name}'" in error and "Traceback" not in error


def test_heads_of_another_chat_template_are_told_unless_there_is_no_template(tiny_folder: Path, tmp_path: Path) -> None:
    heads = MedusaModel.from_pretrained(tiny_folder).heads
    assert heads is not None
    trained = chat_template_hash(tiny_tokenizer())
    config = MedusaConfig(heads=heads.config, base_model_name_or_path=str(tiny_folder), chat_template_hash=trained)
    for name, changed in (("same", config), ("other", replace(config, chat_template_hash="0" * 16))):
        save_heads(tmp_path / name, heads, changed)
    options = ("--prompt", TEXT, "--max-new-tokens", "4")
    assert _run(str(tmp_path / "same"), *options) == 0
    with pytest.warns(UserWarning, match=f"laid out by the template {'0' * 16}"):
        assert _run(str(tmp_path / "other"), *options) == 0
    assert _run(str(tmp_path / "other"), *options, "--no-chat-template") == 0
    assert _run(str(tiny_folder), "--heads", str(tmp_path / "other"), "--drafter", "ngram", *options) == 0
