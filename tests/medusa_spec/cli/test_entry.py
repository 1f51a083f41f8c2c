import subprocess
import sys
from pathlib import Path

import pytest

from medusa_spec.cli import main
from medusa_spec.cli.entry import USER_ERROR


def _exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return stopped.value.code


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code("--help") == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("demo", "generate", "bench", "finetune"))


@pytest.mark.parametrize("command", ["demo", "generate", "bench", "finetune"])
def test_every_command_has_help(command: str) -> None:
    assert _exit_code(command, "--help") == 0


def test_what_the_user_can_mend_is_one_message_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "absent.jsonl"
    assert _exit_code("bench", "--prompts", str(missing)) == USER_ERROR
    captured = capsys.readouterr()
    assert captured.err.startswith("medusa-spec: prompts: expected") and str(missing) in captured.err
    assert "Traceback" not in captured.err and captured.out == ""


def test_without_its_packages_the_command_names_the_extra() -> None:
    code = "import sys\nsys.modules['typer'] = None\nfrom medusa_spec.cli import main\nmain(['demo'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == USER_ERROR
    assert "medusa-spec[cli]" in done.stderr and "Traceback" not in done.stderr


def test_help_loads_no_torch() -> None:
    code = "import sys\ntry:\n    from medusa_spec.cli import main\n    main(['--help'])\n"
    code += "except SystemExit:\n    assert 'torch' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_file_in_the_way_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    options = ("--model", "m", "--data", "d.jsonl", "--output", str(tmp_path / "file"))
    assert _exit_code("finetune", *options) == USER_ERROR
    error = capsys.readouterr().err
    assert error.startswith("medusa-spec: ") and str(tmp_path / "file") in error
