"""medusa-spec finetune: heads for the user's model on the user's conversations."""

import sys
from typing import Any

from medusa_spec.errors import MedusaError

EXTRA = "pip install 'medusa-spec[finetune,cli]'"


def finetune(
    *,
    model: str,
    data: tuple[str, ...],
    output: str | None,
    preview: bool,
    stages: tuple[str, ...] | None,
    redo: str | None,
    settings: dict[str, Any],
) -> None:
    """Run the stages asked for (None: all), or show what would be trained on.

    Args:
        model: Folder or hub id of the target.
        data: Files, hub data sets, or "self".
        output: Folder of the run; not needed for a preview.
        preview: Show a few conversations with the trained tokens marked, and stop.
        stages: Names of stages.
        redo: The stage from which on all is done again.
        settings: Other fields of `FinetuneConfig`; those that are None keep their default, or are those of the heads
            that `init_from` names.
    """
    try:
        from medusa_spec.finetune.config import FinetuneConfig
        from medusa_spec.finetune.given_heads import shaped_as_given
        from medusa_spec.finetune.mask_preview import preview as preview_of
        from medusa_spec.finetune.pipeline import run_pipeline
        from medusa_spec.finetune.processes import everyone
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    given = shaped_as_given({name: value for name, value in settings.items() if value is not None})
    config = FinetuneConfig(model=model, data=data, output=output or ".", **given)
    if preview:
        print(preview_of(config))
        return
    folder = run_pipeline(config, stages=stages, redo=redo)
    if not everyone().main:
        return
    print(f"Done: {folder}", file=sys.stderr)
    if (folder / "heads").is_dir():
        print(f"Try them: medusa-spec generate {folder / 'heads'} --show-accepted")


def missing_package(error: ModuleNotFoundError) -> Exception:
    """An error that names the extra; the same one if the module is this library's own."""
    if (error.name or "").startswith("medusa_spec"):
        return error
    return MedusaError(f"fine-tuning and its records need the package {error.name!r}, which is not installed: {EXTRA}")
