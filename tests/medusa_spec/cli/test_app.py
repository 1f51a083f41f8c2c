import pytest

from medusa_spec.cli import main


def _usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_model_of_generate_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert "model" in _usage_error(capsys, "generate").lower()


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("generate", "--max-new-tokens", "0"),
        ("bench", "--draft-nodes", "0"),
        ("bench", "--dtype", "int3"),
        ("demo", "--limit", "0"),
        ("finetune", "--lm-head", "none"),
    ],
)
def test_value_out_of_range_is_named(capsys: pytest.CaptureFixture[str], command: str, option: str, value: str) -> None:
    model = ["m"] if command == "generate" else []
    assert option in _usage_error(capsys, command, *model, option, value)


def test_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "fly" in _usage_error(capsys, "fly")


def test_benchmark_script_and_bench_take_the_same_options() -> None:
    import inspect

    from medusa_spec.cli.app import bench as command
    from medusa_spec.cli.bench import bench

    translated = {"no_chat_template": "chat_template", "no_baseline": "baseline"}
    options = {translated.get(name, name) for name in inspect.signature(command).parameters}
    assert options - {"json"} == set(inspect.signature(bench).parameters)
