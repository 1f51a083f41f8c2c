"""The commands below `medusa-spec corpus` and their options. Declares; the work is in `corpus.py`."""

from pathlib import Path
from typing import Annotated

import typer

corpus = typer.Typer(no_args_is_help=True, help="Texts on the disk in which --drafter suffix and hybrid look up.")

Folder = Annotated[Path, typer.Argument(help="Folder of the corpus.")]


@corpus.command()
def add(
    folder: Folder,
    files: Annotated[list[Path], typer.Argument(help="Texts, or records (JSON lines, JSON, parquet).")],
    model: Annotated[str, typer.Option(help="Folder or hub id of the model whose tokenizer reads them.")],
    limit: Annotated[
        int | None, typer.Option(help="Most tokens held from now on, 8 bytes each; the oldest are dropped.")
    ] = None,
) -> None:
    """Add texts to a corpus; it is made if it is not there."""
    from medusa_spec.cli.corpus import add as run

    run(folder=folder, files=files, model=model, limit=limit)


@corpus.command()
def show(folder: Folder) -> None:
    """Say what a corpus holds."""
    from medusa_spec.cli.corpus import show as run

    run(folder=folder)
