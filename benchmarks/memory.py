"""Peak and lasting memory of plain Hugging Face decoding and of this project's, each in a process of its own.

python benchmarks/memory.py [MODEL] [--heads smollm2-135m] [--prompt-tokens 200] [--new-tokens 128]

Ends with one JSON line. Resident memory counts pages of mapped files, too, as Hugging Face loads weights.
"""

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_spec.comparison_table import columns
from medusa_spec.default_model import default_model_path

WAYS = ("Hugging Face", "medusa-spec")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both ways, print the table, then the JSON line."""
    options = _parser().parse_args(arguments)
    name = options.model or str(default_model_path())
    if options.way:
        print(json.dumps(decode(options.way, name, options)))
        return
    found = {way: _in_a_process(way, name, options) for way in WAYS}
    rows = [["", "loaded, MiB", "peak, MiB", "after decoding, MiB"]]
    rows += [[way, *(f"{found[way][key]:.0f}" for key in ("loaded", "peak", "after"))] for way in WAYS]
    ratio = {key: found[WAYS[1]][key] / found[WAYS[0]][key] for key in ("peak", "after")}
    print(columns(rows))
    print(f"{WAYS[1]} / {WAYS[0]}: peak {ratio['peak']:.2f}, after decoding {ratio['after']:.2f}\n")
    print(json.dumps({"memory_mib": found, "ratio": ratio}))


def decode(way: str, name: str, options: argparse.Namespace) -> dict[str, float]:
    """Loads, decodes and says what memory it took."""
    import torch
    from transformers import AutoModelForCausalLM

    from medusa_spec import MedusaModel

    ids = torch.arange(options.prompt_tokens)[None] + 100
    length = {"max_new_tokens": options.new_tokens, "min_new_tokens": options.new_tokens, "do_sample": False}
    model: Any
    if way == WAYS[0]:
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()
    else:
        model = MedusaModel.from_pretrained(name, heads=options.heads)
    loaded = _resident()
    model.generate(ids, **length)
    return {"loaded": loaded, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "after": _resident()}


def _in_a_process(way: str, name: str, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, name, "--way", way, "--heads", options.heads]
    command += ["--prompt-tokens", str(options.prompt_tokens), "--new-tokens", str(options.new_tokens)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(out.splitlines()[-1]))


def _resident() -> float:
    """MiB of this process now; Linux alone says so."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder or hub id; default: the default model")
    parser.add_argument("--heads", default="smollm2-135m")
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
