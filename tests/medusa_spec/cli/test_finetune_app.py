"""The options of the command that trains."""

from dataclasses import fields

import typer.main

from medusa_spec.cli.app import app
from medusa_spec.cli.finetune_app import REPEATABLE
from medusa_spec.finetune import FinetuneConfig


def test_every_setting_has_an_option() -> None:
    shown = {option.name for option in typer.main.get_command(app).commands["finetune"].params}
    settings = {field.name for field in fields(FinetuneConfig)}
    assert {REPEATABLE.get(name, name) for name in shown} == settings | {"preview", "stage", "redo"}
