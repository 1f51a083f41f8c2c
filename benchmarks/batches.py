"""What speculation is worth in a batch: rows 1, 2, 4, 8, 16 side by side, against both baselines.

python benchmarks/batches.py PROMPTS [--heads NAME] [--rows 1 2 4 8 16] [--groups 2] [--max-new-tokens 96]
    [--ways hf plain fixed auto hybrid] [--json FILE] [--plot FILE]

Prompts are dealt into groups of so many rows, padded on the left. Every group is decoded by every way, in an order that
rotates, in one process: by Hugging Face's generate on an untouched load (hf), through this project without drafts
(plain), with drafts at every pass (fixed), as the controller decides (auto), with look-up as well (hybrid). Speeds
count tokens up to and including each row's end. Ends with one JSON line.
"""

import argparse
import json
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from medusa_spec import HybridDrafter, MedusaModel
from medusa_spec.cli.loading import load, load_baseline
from medusa_spec.comparison_table import columns
from medusa_spec.figures import Run, speed_ratio
from medusa_spec.files import write_text
from medusa_spec.machine import LoadWatch, machine_facts, quiet_words
from medusa_spec.prompts import encode, read_prompts
from medusa_spec.stats import DecodingStats

WARM_UP = 16
HF, PLAIN = "hf", "plain"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure size after size and print the table."""
    options = _parser().parse_args(arguments)
    loaded = load(None, options.heads, None)
    baseline: Any = load_baseline(loaded.model) if HF in options.ways else None
    prompts = read_prompts(options.prompts)
    encoded = [encode(loaded.tokenizer, list(prompt.messages))["input_ids"][0] for prompt in prompts]
    watch, points = LoadWatch(), []
    for rows in options.rows:
        groups = dealt(encoded, rows, options.groups, loaded.tokenizer.pad_token_id or 0)
        points.append(measure(loaded.model, baseline, groups, rows, options))
        print(table(points), flush=True)
    print(quiet_words(watch.others()))
    settings = {key: str(value) for key, value in vars(options).items()}
    machine = machine_facts(loaded.model.backbone.device, loaded.model.backbone.dtype)
    line = json.dumps({"points": points, "settings": settings, "machine": machine, "busy": watch.others()})
    print(line)
    if options.json is not None:
        write_text(options.json, line + "\n")
    if options.plot is not None:
        draw(points, options.plot)


def dealt(encoded: Sequence[torch.Tensor], rows: int, groups: int, padding: int) -> list[dict[str, torch.Tensor]]:
    """Groups of `rows` prompts as ids and mask [rows, T]; evenly spread over the prompts, so over their categories."""
    if rows > len(encoded):
        raise SystemExit(f"--rows must be at most {len(encoded)}, the number of prompts, got {rows}")
    count, made = min(groups, len(encoded) // rows), []
    for group in range(count):
        own = [encoded[(group + count * row) * len(encoded) // (count * rows)] for row in range(rows)]
        longest = max(map(len, own))
        ids = torch.stack([torch.nn.functional.pad(one, (longest - len(one), 0), value=padding) for one in own])
        mask = torch.stack([torch.arange(longest) >= longest - len(one) for one in own]).long()
        made.append({"input_ids": ids, "attention_mask": mask})
    return made


def ways_of(model: MedusaModel, baseline: Any) -> dict[str, Any]:
    """What decodes in each way."""

    def through(**options: Any) -> Any:
        return lambda **given: model.generate(**given, **options)

    return {
        HF: baseline.generate if baseline is not None else None,
        PLAIN: through(draft_nodes=0),
        "fixed": through(speculation="fixed"),
        "auto": through(speculation="auto"),
        "hybrid": through(drafter=HybridDrafter(model.drafter), speculation="auto"),
    }


def measure(
    model: MedusaModel, baseline: Any, groups: list[dict[str, torch.Tensor]], rows: int, options: Any
) -> dict[str, Any]:
    """All ways on all groups of one size."""
    ways = {name: way for name, way in ways_of(model, baseline).items() if name in options.ways}
    eos: Any = model.generation_config.eos_token_id
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    for way in ways.values():
        answer(way, groups[0], WARM_UP, ends)
    ways = {name: way for name, way in ways_of(model, baseline).items() if name in ways}  # look-up forgets the warm-up
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    stats: dict[str, list[DecodingStats]] = {name: [] for name in ways}
    for index, group in enumerate(groups):
        names = list(ways)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            runs[name].append(answer(ways[name], group, options.max_new_tokens, ends))
            if name != HF and model.last_stats is not None:
                stats[name].append(model.last_stats)
    return {"rows": rows, "ways": {name: figures(name, runs, stats[name]) for name in ways}}


def answer(way: Any, group: dict[str, torch.Tensor], tokens: int, ends: Collection[int]) -> Run:
    """One timed batch; its rows' tokens up to and including their ends, one behind the other."""
    began = time.perf_counter()
    out = way(**group, do_sample=False, max_new_tokens=tokens)
    seconds = time.perf_counter() - began
    answers = out[:, group["input_ids"].shape[1] :].tolist()
    return Run(tuple(token for row in answers for token in row[: ended(row, ends)]), seconds)


def ended(row: list[int], ends: Collection[int]) -> int:
    """Tokens of a row up to and including the first that ends it."""
    return next((place + 1 for place, token in enumerate(row) if token in ends), len(row))


def figures(name: str, runs: dict[str, list[Run]], stats: list[DecodingStats]) -> dict[str, Any]:
    """Of one way."""
    own = runs[name]
    found: dict[str, Any] = {"tokens_per_second": sum(len(r.tokens) for r in own) / sum(r.seconds for r in own)}
    for base in (HF, PLAIN):
        if base in runs and base != name:
            found[f"x {base}"] = speed_ratio(own, runs[base])._asdict()
            found[f"same as {base}"] = sum(a.tokens == b.tokens for a, b in zip(own, runs[base], strict=True))
    if stats:
        passes, drafted = (sum(getattr(one, field) for one in stats) for field in ("passes", "drafted_passes"))
        nodes = [count for one in stats for count in one.nodes]
        found |= {
            "mu": sum(one.accepted for one in stats) / max(drafted, 1),
            "drafted": drafted / max(passes, 1),
            "nodes": sum(nodes) / max(len(nodes), 1),
        }
    return found


def table(points: Sequence[dict[str, Any]]) -> str:
    """All sizes so far."""
    rows = [["rows", "way", "tokens/s", "x Hugging Face", "x own plain", "mu", "drafted", "nodes", "same as plain"]]
    for point in points:
        for name, found in point["ways"].items():
            ratios = [found.get(f"x {base}") for base in (HF, PLAIN)]
            words = ["" if ratio is None else f"{ratio['value']:.2f}x" for ratio in ratios]
            counts = [f"{found[key]:{form}}" if key in found else "" for key, form in KEYS.items()]
            same = str(found.get(f"same as {PLAIN}", ""))
            rows.append([str(point["rows"]), name, f"{found['tokens_per_second']:.0f}", *words, *counts, same])
    return columns(rows)


KEYS = {"mu": ".2f", "drafted": ".0%", "nodes": ".1f"}


def draw(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Speed-up over plain decoding by rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    sizes = [point["rows"] for point in points]
    for name in ("fixed", "auto", "hybrid"):
        if all(name in point["ways"] for point in points):
            ratios = [point["ways"][name][f"x {PLAIN}"] for point in points]
            axes.plot(sizes, [ratio["value"] for ratio in ratios], marker="o", label=name)
            axes.fill_between(sizes, [r["low"] for r in ratios], [r["high"] for r in ratios], alpha=0.15)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xscale="log", xlabel="rows of the batch", ylabel="speed, times own plain decoding")
    axes.set_xticks(sizes, labels=[str(size) for size in sizes])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help="JSON lines with prompt, turns or messages")
    parser.add_argument("--heads", help="folder, packaged name or hub id")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--groups", type=int, default=2, help="batches of each size")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--ways", nargs="+", default=[HF, PLAIN, "fixed", "auto", "hybrid"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser


if __name__ == "__main__":
    main()
