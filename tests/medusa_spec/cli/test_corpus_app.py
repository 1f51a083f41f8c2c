import pytest

from medusa_spec.cli import main


@pytest.mark.parametrize(
    ("arguments", "named"),
    [("add corpus", "files"), ("add corpus text.txt", "--model"), ("show", "folder"), ("fly", "fly")],
)
def test_what_is_missing_or_unknown_is_named(capsys: pytest.CaptureFixture[str], arguments: str, named: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["corpus", *arguments.split()])
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err.lower()
