"""The medusa-spec command."""

from typing import Any


def __getattr__(name: str) -> Any:
    # Lazy, so that importing the package needs neither typer nor torch.
    if name == "main":
        from medusa_spec.cli.entry import main

        return main
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
