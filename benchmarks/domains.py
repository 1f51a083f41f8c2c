"""Adapters of one set of heads on prompts of several domains: μ of each on each, swapped at run time.

python benchmarks/domains.py --heads smollm2-135m --adapter maths=runs/maths/heads --adapter code=runs/code/heads
    --prompts maths=runs/maths --prompts code=runs/code [--limit 12] [--max-new-tokens 160] [--draft-nodes 7]

--prompts names a finished run, whose held-out prompts are decoded, or a file of prompts. The target is loaded once; all
outputs of a prompt must be the same. All draft with the heads' best static tree of so many nodes, so that guesses alone
differ. Ends with one JSON line.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from medusa_spec import MedusaModel
from medusa_spec.checkpoint import heads_folder, read_config
from medusa_spec.comparison_table import columns
from medusa_spec.default_model import default_model_path
from medusa_spec.files import read_json
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data import held_out_prompts
from medusa_spec.machine import machine_facts
from medusa_spec.prompts import Prompt, encode, read_prompts
from medusa_spec.stats import DecodingStats
from medusa_spec.tree import best_tree

NONE = "none"


def main(arguments: Sequence[str] | None = None) -> None:
    """Decode, check that outputs agree, and print the table."""
    options = _parser().parse_args(arguments)
    disable_progress_bar()
    name = options.model or str(default_model_path())
    tokenizer, values = AutoTokenizer.from_pretrained(name), read_config(heads_folder(options.heads)).values
    assert values is not None, "the heads were not calibrated"
    tree = best_tree(values, options.draft_nodes)
    model = MedusaModel.from_pretrained(name, heads=options.heads, tree=tree, speculation="fixed")
    adapters = dict(text.split("=", 1) for text in options.adapter)
    for adapter, folder in adapters.items():
        model.load_adapter(folder, adapter)
    prompts = {domain: prompts_of(Path(place), options) for domain, place in _pairs(options.prompts)}
    stats = {domain: {adapter: DecodingStats() for adapter in (NONE, *adapters)} for domain in prompts}
    swaps: list[float] = []
    for domain, asked in prompts.items():
        for prompt in asked:
            inputs, outputs = encode(tokenizer, prompt.messages), []
            for adapter in (NONE, *adapters):
                began = time.perf_counter()
                model.disable_adapters() if adapter == NONE else model.set_adapter(adapter)
                swaps.append(time.perf_counter() - began)
                out = model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False)
                outputs.append(out[0].tolist())
                stats[domain][adapter] = stats[domain][adapter].merge(model.last_stats)
            assert all(output == outputs[0] for output in outputs), "an adapter of the heads changed the output"
    rows = [["prompts", "", *(f"mu, {adapter}" for adapter in (NONE, *adapters))]]
    for domain, by_adapter in stats.items():
        rows.append([domain, str(len(prompts[domain])), *(f"{found.mu:.3f}" for found in by_adapter.values())])
    print(columns(rows))
    print(f"All outputs of a prompt are the same; a swap took {max(swaps) * 1e3:.1f} ms at most.\n")
    facts = machine_facts(model.device, model.target.dtype)
    print(json.dumps({"mu": {d: {a: s.mu for a, s in by.items()} for d, by in stats.items()}, **facts}))


def prompts_of(place: Path, options: argparse.Namespace) -> list[Prompt]:
    """Held-out prompts of a run, or the prompts of a file."""
    if place.is_file():
        return read_prompts(place, limit=options.limit)
    values = read_json(place / "data.done.json")["settings"]
    config = FinetuneConfig(
        model=values["model"],
        data=tuple(options.data),
        output=str(place),
        sources=values["sources"],
        held_out=values["held_out"],
    )
    return [Prompt(messages=tuple(found[0])) for found in held_out_prompts(config, options.limit)]


def _pairs(texts: Sequence[str]) -> list[list[str]]:
    return [text.split("=", 1) for text in texts]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; default: the default model")
    parser.add_argument("--heads", required=True, help="heads that the adapters are of")
    parser.add_argument("--adapter", action="append", required=True, help="name=folder; repeatable")
    parser.add_argument("--prompts", action="append", required=True, help="domain=run or domain=file; repeatable")
    parser.add_argument("--data", nargs="+", default=["unused"], help="the data of the runs, for their prompts")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each domain")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--draft-nodes", type=int, default=7)
    return parser


if __name__ == "__main__":
    main()
