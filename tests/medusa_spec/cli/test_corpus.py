import json
from pathlib import Path

import pytest

from medusa_spec.cli import main
from medusa_spec.cli.corpus import open_corpus
from medusa_spec.errors import ConfigError
from medusa_spec.testing import tiny_tokenizer
from medusa_spec.vocabulary import vocabulary_identity


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[object, str]:
    """The exit code, and what was printed."""
    with pytest.raises(SystemExit) as stopped:
        main(["corpus", *map(str, arguments)])
    printed = capsys.readouterr()
    return stopped.value.code, printed.out + printed.err


def after(folder: Path, text: str, depth: int) -> list[str]:
    tokenizer = tiny_tokenizer()
    places = open_corpus(folder).find(tokenizer(text)["input_ids"], depth=depth)
    return [str(tokenizer.decode(list(place.tokens))) for place in places]


def test_texts_and_conversations_are_added_and_shown(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "corpus"
    (tmp_path / "text.txt").write_text("the quick brown fox")
    messages = [{"role": "user", "content": "Name a fox"}, {"role": "assistant", "content": "Reynard the fox"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    code, printed = run(
        capsys, "add", folder, tmp_path / "text.txt", tmp_path / "chats.jsonl", "--model", tiny_folder, "--limit", 4096
    )
    identity = vocabulary_identity(tiny_tokenizer())
    assert code == 0 and "2 texts" in printed and "of at most 4096, in 1 files" in printed and identity in printed
    assert after(folder, "quick", 6) == [" brown"] and after(folder, "Reynard", 4) == [" the"]
    (tmp_path / "more.txt").write_text("a lazy dog")
    assert run(capsys, "add", folder, tmp_path / "more.txt", "--model", tiny_folder)[0] == 0
    code, printed = run(capsys, "show", folder)
    assert code == 0 and "3 texts" in printed and "of at most 4096, in 2 files" in printed
    assert printed.count(".safetensors: ") == 2


def test_wrong_files_and_folders_are_named(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = run(capsys, "add", tmp_path / "corpus", tmp_path / "none.txt", "--model", tiny_folder)
    assert code == 2 and "none.txt" in printed and not (tmp_path / "corpus").exists()
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    code, printed = run(capsys, "add", tmp_path / "corpus", tmp_path / "bytes.txt", "--model", tiny_folder)
    assert code == 2 and "UTF-8" in printed
    (tmp_path / "text.txt").write_text("the quick brown fox")
    code, printed = run(capsys, "add", tmp_path / "corpus", tmp_path / "text.txt", "--model", tmp_path / "none")
    assert code == 2 and "--model" in printed
    code, printed = run(capsys, "show", tmp_path / "corpus")
    assert code == 2 and "found none at" in printed


def test_a_corpus_of_another_tokenizer_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox")
    with pytest.raises(SystemExit):
        main(["corpus", "add", str(tmp_path / "corpus"), str(tmp_path / "text.txt"), "--model", str(tiny_folder)])
    with pytest.raises(ConfigError, match="not of the tokenizer 'other'"):
        open_corpus(tmp_path / "corpus", "other")
