"""medusa-spec export: heads in a folder that another engine reads."""

import json
import sys
from pathlib import Path

from medusa_spec.cli.loading import load
from medusa_spec.export import export_heads
from medusa_spec.heads import HeadsConfig

METHODS = {"medusa": "medusa", "eagle": "eagle", "eagle3": "eagle3"}
"""Families to what vLLM calls them."""
PROPOSER_CLASS = "vllm_proposer.MedusaHeads"


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
    name = loaded.medusa_config.base_model_name_or_path or loaded.target.name_or_path
    use = USES.get(to)
    if use is not None:
        print(use(report.folder, str(name), loaded.medusa_config.heads))


def _method(folder: Path, target: str, heads: HeadsConfig) -> str:
    """The call for heads that vLLM itself knows."""
    return _serve(target, METHODS[heads.kind], str(folder), heads.num_heads)


def _class(folder: Path, target: str, heads: HeadsConfig) -> str:
    """The call for heads that bring a class of their own."""
    return f"PYTHONPATH={folder} " + _serve(target, "custom_class", PROPOSER_CLASS, heads.num_heads)


def _serve(target: str, method: str, model: str, guesses: int) -> str:
    options = {"method": method, "model": model, "num_speculative_tokens": guesses}
    return f"vllm serve {target} --speculative-config '{json.dumps(options)}'"


USES = {"vllm": _method, "vllm-class": _class}
"""Names of formats to what shows the command that reads them."""
