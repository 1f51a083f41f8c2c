"""What a pass costs: Hugging Face's one-token pass, and passes of N nodes, prepared and not; one JSON line last.

python benchmarks/step.py [MODEL] [--prefix 256 2048] [--sizes 1 2 4 8 16 32] [--rounds 9]

All are timed in turn, round after round, in one process; medians count. Then the linear layers alone.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from medusa_spec.backbone import Backbone
from medusa_spec.comparison_table import columns
from medusa_spec.cost import median_seconds, pass_timer
from medusa_spec.default_model import default_model_path
from medusa_spec.machine import LoadWatch, machine_facts, quiet_words
from medusa_spec.prepare import prepare


def main(arguments: Sequence[str] | None = None) -> None:
    """Time, print the tables, then the JSON line."""
    options = _parser().parse_args(arguments)
    name = options.model or str(default_model_path())
    load = LoadWatch()

    def target() -> Any:
        return AutoModelForCausalLM.from_pretrained(name, dtype=options.dtype).eval().requires_grad_(False)

    untouched, plain, fast = target(), Backbone(target()), target()
    prepared = prepare(fast, fast.get_output_embeddings())
    packed = Backbone(fast)
    results: dict[str, Any] = {"prepared": prepared.reason, "passes_ms": {}}
    for prefix in options.prefix:
        timers = {"Hugging Face, 1 token": _hugging_face_timer(untouched, prefix)}
        for size in options.sizes:
            timers[f"not prepared, N = {size}"] = pass_timer(plain, size, prefix)
            timers[f"prepared, N = {size}"] = pass_timer(packed, size, prefix)
        found = {key: seconds * 1e3 for key, seconds in median_seconds(timers, options.rounds).items()}
        results["passes_ms"][prefix] = found
        unit = found["Hugging Face, 1 token"]
        rows = [[f"prefix {prefix}", "ms", "x Hugging Face's 1 token"]]
        rows += [[key, f"{value:.1f}", f"{value / unit:.2f}"] for key, value in found.items()]
        print(columns(rows), end="\n\n")
    print(prepared.reason)
    print(quiet_words(load.others()), end="\n\n")
    facts = machine_facts(packed.device, packed.dtype)
    print(json.dumps({**results, "busy_cores_elsewhere": load.others(), "machine": facts}))


def _hugging_face_timer(model: Any, prefix: int) -> Callable[[], None]:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.arange(prefix)[None] % model.config.vocab_size, cache=cache)

    @torch.inference_mode()
    def run() -> None:
        model(torch.zeros(1, 1, dtype=torch.long), cache=cache).logits[:, -1].float().argmax(-1).tolist()
        cache.crop(-1)

    return run


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("model", nargs="?", help="folder or hub id; default: the default model")
    add("--prefix", type=int, nargs="+", default=[256, 2048])
    add("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    add("--rounds", type=int, default=9)
    add("--dtype", default="auto")
    return parser


if __name__ == "__main__":
    main()
