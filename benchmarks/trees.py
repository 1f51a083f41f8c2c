"""Ways to draft beside one another: static trees, grown ones, the controller, look-ups, both together.

python benchmarks/trees.py PROMPTS [--heads NAME] [--per-category 2] [--max-new-tokens 192] [--static 3 5 7]
    [--ways plain static grown auto suffix hybrid] [--temperature 0] [--json FILE]

All ways decode every prompt, in an order that rotates, in one process and on one load of the target. Ratios are to this
project's own plain decoding, with a bootstrap interval over prompts; then by category. `choice`, a part of `draft`, is
the share of a step in which the tree is chosen among the guesses. Ends with one JSON line.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from choice_clock import ChoiceClock

from medusa_spec import MedusaModel
from medusa_spec.cli.loading import load
from medusa_spec.comparison_table import columns
from medusa_spec.drafters import HeadsDrafter, HybridDrafter, NgramDrafter, SuffixDrafter
from medusa_spec.figures import Run, speed_ratio
from medusa_spec.files import write_text
from medusa_spec.machine import LoadWatch, machine_facts, quiet_words
from medusa_spec.prompts import encode, read_prompts
from medusa_spec.stats import PHASES, DecodingStats
from medusa_spec.tree import best_tree

WARM_UP = 24
PLAIN = "plain"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the tables."""
    options = _parser().parse_args(arguments)
    loaded = load(None, options.heads, None)
    model = loaded.model
    asked = read_prompts(options.prompts, per_category=options.per_category, limit=options.limit)
    inputs = [encode(loaded.tokenizer, list(prompt.messages)) for prompt in asked]
    ways = {name: way for name, way in ways_of(model, options.static).items() if name.split()[0] in options.ways}
    for way in ways.values():
        run(model, way, inputs[0], WARM_UP, options, 0)
    load_watch, runs = LoadWatch(), {name: list[Run]() for name in ways}
    stats: dict[str, list[DecodingStats]] = {name: [] for name in ways}
    chosen = dict.fromkeys(ways, 0.0)
    with ChoiceClock().watching() as clock:
        for index, given in enumerate(inputs):
            order = list(ways)[index % len(ways) :] + list(ways)[: index % len(ways)]
            for name in order:
                made, counted = run(model, ways[name], given, options.max_new_tokens, options, index)
                runs[name].append(made)
                stats[name].append(counted)
                chosen[name] += clock.lap()
            print(f"{index + 1} of {len(inputs)}", flush=True)
    categories = [prompt.category for prompt in asked]
    print(whole_table(runs, stats, chosen), category_table(runs, categories), sep="\n\n", end="\n\n")
    print(quiet_words(load_watch.others()))
    line = json.dumps(record(runs, stats, chosen, categories, options, model, load_watch.others()))
    print(line)
    if options.json is not None:
        write_text(options.json, line + "\n")


def ways_of(model: MedusaModel, sizes: Sequence[int]) -> dict[str, dict[str, Any]]:
    """What each way gives to `generate`."""
    ways: dict[str, dict[str, Any]] = {PLAIN: {"draft_nodes": 0}}
    if isinstance(model.drafter, HeadsDrafter) and model.drafter.values is not None:
        place: dict[str, Any] = {"dtype": model.backbone.dtype, "device": model.backbone.head_device}
        for size in sizes:
            tree = best_tree(model.drafter.values, size)
            drafter = HeadsDrafter(model.drafter.heads, tree, follow_adapters=False, **place)
            ways[f"static {size}"] = {"drafter": drafter, "speculation": "fixed"}
    hybrid = HybridDrafter(model.drafter, SuffixDrafter())
    return ways | {
        "grown": {"speculation": "fixed"},
        "auto": {"speculation": "auto"},
        "ngram": {"drafter": NgramDrafter(), "speculation": "auto"},
        "suffix": {"drafter": SuffixDrafter(), "speculation": "auto"},
        "hybrid": {"drafter": hybrid, "speculation": "auto"},
    }


def run(
    model: MedusaModel, way: dict[str, Any], inputs: dict[str, torch.Tensor], tokens: int, options: Any, index: int
) -> tuple[Run, DecodingStats]:
    """One timed answer."""
    sampling = {"do_sample": True, "temperature": options.temperature} if options.temperature else {"do_sample": False}
    torch.manual_seed(options.seed + index)
    began = time.perf_counter()
    out = model.generate(**inputs, **sampling, **way, max_new_tokens=tokens)
    seconds = time.perf_counter() - began
    assert model.last_stats is not None
    return Run(tuple(out[0, inputs["input_ids"].shape[1] :].tolist()), seconds), model.last_stats


def whole_table(runs: dict[str, list[Run]], stats: dict[str, list[DecodingStats]], chosen: dict[str, float]) -> str:
    """Over all prompts: ratio, μ, time."""
    rows = [["", "x own plain", "95 %", "mu", "tau", "nodes", "drafted", "draft", "choice", "same as plain"]]
    for name, found in runs.items():
        ratio, total = speed_ratio(found, runs[PLAIN]), merged(stats[name])
        same = sum(one.tokens == other.tokens for one, other in zip(found, runs[PLAIN], strict=True))
        nodes = sum(total.nodes) / max(len(total.nodes), 1)
        rows.append(
            [
                name,
                f"{ratio.value:.2f}x",
                f"[{ratio.low:.2f}, {ratio.high:.2f}]",
                f"{total.mu:.2f}",
                f"{total.tau:.2f}",
                f"{nodes:.1f}",
                f"{total.drafted_passes / max(total.passes, 1):.0%}",
                f"{total.share['draft']:.1%}",
                f"{choosing(chosen[name], total):.1%}",
                f"{same} of {len(found)}",
            ]
        )
    return columns(rows)


def choosing(seconds: float, total: DecodingStats) -> float:
    """Share of the steps' time."""
    return seconds / max(sum(total.seconds[phase] for phase in PHASES), 1e-9)


def category_table(runs: dict[str, list[Run]], categories: Sequence[str]) -> str:
    """Ratios to plain decoding by category."""
    rows = [["x own plain", *runs]]
    for category in dict.fromkeys(categories):
        of = [place for place, name in enumerate(categories) if name == category]
        plain = [runs[PLAIN][place] for place in of]
        ratios = [speed_ratio([found[place] for place in of], plain).value for found in runs.values()]
        rows.append([category or "-", *(f"{ratio:.2f}x" for ratio in ratios)])
    return columns(rows)


def merged(stats: Sequence[DecodingStats]) -> DecodingStats:
    """The sum of all."""
    total = stats[0]
    for one in stats[1:]:
        total = total.merge(one)
    return total


def record(
    runs: dict[str, list[Run]],
    stats: dict[str, list[DecodingStats]],
    chosen: dict[str, float],
    categories: Sequence[str],
    options: Any,
    model: MedusaModel,
    others: float | None,
) -> dict[str, Any]:
    """For machines."""
    figures = {}
    for name, found in runs.items():
        total = merged(stats[name])
        figures[name] = {
            "speedup": speed_ratio(found, runs[PLAIN])._asdict(),
            "mu": total.mu,
            "tau": total.tau,
            "seconds": [run.seconds for run in found],
            "tokens": [len(run.tokens) for run in found],
            "share": total.share,
            "choice": choosing(chosen[name], total),
        }
    settings = {key: str(value) for key, value in vars(options).items()}
    machine = machine_facts(model.backbone.device, model.backbone.dtype)
    return {"ways": figures, "categories": list(categories), "settings": settings, "machine": machine, "busy": others}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help="JSON lines with prompt, turns or messages")
    parser.add_argument("--heads", help="folder, packaged name or hub id")
    parser.add_argument("--per-category", type=int)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--static", type=int, nargs="*", default=[3, 5, 7], help="draft nodes of static trees")
    parser.add_argument("--ways", nargs="+", default=[PLAIN, "static", "grown", "auto", "suffix", "hybrid"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    main()
