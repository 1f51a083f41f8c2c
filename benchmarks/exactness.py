"""Do trees say what the target says? Counts equal outputs, ties that rounding tipped, and faults; one JSON line last.

python benchmarks/exactness.py [MODEL] [--heads NAME] [--prompts FILE] [--limit N] [--dtype float32] … (--help)

Greedy outputs of Hugging Face's generate on an untouched load are compared with those of the tree and of this
project's plain decoding. A difference is excused only by the rule of `medusa_spec.excuse`; any other is a fault, and
the exit status is then 1.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_spec.cli.loading import load, load_baseline
from medusa_spec.excuse import explain
from medusa_spec.machine import machine_facts
from medusa_spec.prompts import encode, packaged_prompts, read_prompts


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print a line per difference and one of JSON; 1 if there was a fault."""
    options = _parser().parse_args(arguments)
    loaded = load(options.model, options.heads, options.drafter, dtype=options.dtype)
    baseline: Any = load_baseline(loaded.model)
    found = {
        arm: {"equal": 0, "excused": 0, "faults": 0, "largest_excused_gap_over_noise": 0.0} for arm in ("tree", "plain")
    }
    tokens, prompts = 0, read_prompts(options.prompts, limit=options.limit)
    for prompt in prompts:
        inputs = encode(loaded.tokenizer, prompt.messages)
        settings = {"do_sample": False, "max_new_tokens": options.max_new_tokens}
        start = inputs["input_ids"].shape[1]
        expected = baseline.generate(**inputs, **settings)[0, start:].tolist()
        tokens += len(expected)
        for arm, nodes in (("tree", None), ("plain", 0)):
            drafted = loaded.model.generate(**inputs, **settings, draft_nodes=nodes)[0, start:].tolist()
            difference = explain(baseline, inputs["input_ids"], expected, drafted)
            if difference is None:
                found[arm]["equal"] += 1
                continue
            kind = "excused" if difference.excused else "faults"
            found[arm][kind] += 1
            if difference.excused:
                ratio = difference.gap / difference.noise
                found[arm]["largest_excused_gap_over_noise"] = max(
                    found[arm]["largest_excused_gap_over_noise"], round(ratio, 3)
                )
            print(f"{prompt.category} {prompt.name}, {arm}: {kind} {difference}")
    facts = machine_facts(loaded.model.device, loaded.model.dtype)
    print(json.dumps({"prompts": len(prompts), "tokens": tokens, **found, "labels": loaded.labels, "machine": facts}))
    return 1 if any(counts["faults"] for counts in found.values()) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("model", nargs="?", help="folder or hub id; default: the default model")
    add("--heads", help="folder, packaged name or hub id; default: the model's own, else n-grams")
    add("--drafter", help='"heads", "hybrid", or "suffix" and "ngram", which need no heads')
    add("--prompts", type=Path, default=packaged_prompts(), help="JSON lines with prompt, turns or messages")
    add("--limit", type=int, help="prompts, in turn from all categories")
    add("--max-new-tokens", type=int, default=128)
    add("--dtype", default="float32")
    return parser


if __name__ == "__main__":
    sys.exit(main())
