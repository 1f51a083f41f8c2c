"""medusa-spec export: heads in a folder that another engine reads."""

import json
import sys
from pathlib import Path

from medusa_spec.cli.loading import load
from medusa_spec.export import export_heads

METHODS = {"medusa": "medusa", "eagle": "eagle", "eagle3": "eagle3"}
"""Families to what vLLM calls them."""


def export(*, heads: str, output: Path, to: str, model: str | None, dtype: str) -> None:
    """Write the folder and say how it is used.

    Args:
        heads: Folder, packaged name or hub id.
        output: Folder to write.
        to: Name of a format, see `export_heads`.
        model: The target; None takes the one that the heads name.
        dtype: Of the weights; `auto` is the target's.
    """
    loaded = load(model or heads, heads if model else None, None, dtype=dtype).model
    assert loaded.medusa_config is not None
    report = export_heads(loaded, output, to=to)
    print(f"{report.folder}: {report.format}, read back with a difference of {report.difference:.1g} in logits")
    for note in report.notes:
        print(f"Note: {note}.", file=sys.stderr)
    if to == "vllm":
        config = loaded.medusa_config.heads
        options = {
            "method": METHODS[config.kind],
            "model": str(report.folder),
            "num_speculative_tokens": config.num_heads,
        }
        name = loaded.medusa_config.base_model_name_or_path or loaded.target.name_or_path
        print(f"vllm serve {name} --speculative-config '{json.dumps(options)}'")
