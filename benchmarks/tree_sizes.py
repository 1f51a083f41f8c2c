"""Speed-up against tree size, measured and predicted, and what the controller does over a long text; two pictures.

python benchmarks/tree_sizes.py PROMPTS --output FOLDER [--heads NAME] [--limit 6] [--sizes 1 2 3 4 6 8 12 16 24 32]
    [--max-new-tokens 128] [--long 1200]

The sizes are of the best static trees by the heads' calibration; all of them and plain decoding decode every prompt, in
turn, in an order that rotates. Predicted: tau T(1) / (T(N) + draft + rest), with T(N) as it is measured when the model
is wrapped, the time beside the pass as it was seen, and tau once by the calibration and once as it was seen. The long
text is one answer whose end is put off. Writes tree-sizes.png, controller.png and tree-sizes.json.
"""

import argparse
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from trees import PLAIN, merged, run

from medusa_spec.cli.loading import load
from medusa_spec.comparison_table import columns
from medusa_spec.drafters import HeadsDrafter
from medusa_spec.figures import Run, speed_ratio
from medusa_spec.files import write_json
from medusa_spec.finetune.plots import save_plot
from medusa_spec.machine import LoadWatch, machine_facts, quiet_words
from medusa_spec.prompts import encode, read_prompts
from medusa_spec.stats import DecodingStats
from medusa_spec.tree import best_tree, expected_accepted

SMOOTH = 16
"""Passes over which the second picture takes means."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, draw."""
    options = _parser().parse_args(arguments)
    loaded, watch = load(None, options.heads, None), LoadWatch()
    model, drafter = loaded.model, loaded.model.drafter
    assert isinstance(drafter, HeadsDrafter) and drafter.values is not None, "heads with counts of their rank paths"
    inputs = [encode(loaded.tokenizer, list(p.messages)) for p in read_prompts(options.prompts, limit=options.limit)]
    place: dict[str, Any] = {"dtype": model.backbone.dtype, "device": model.backbone.head_device}
    ways: dict[str, dict[str, Any]] = {PLAIN: {"draft_nodes": 0}}
    for size in options.sizes:
        static = HeadsDrafter(drafter.heads, best_tree(drafter.values, size), follow_adapters=False, **place)
        ways[str(size)] = {"drafter": static, "speculation": "fixed"}
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    stats: dict[str, list[DecodingStats]] = {name: [] for name in ways}
    for index, given in enumerate([inputs[0], *inputs]):
        order = list(ways)[index % len(ways) :] + list(ways)[: index % len(ways)]
        for name in order:
            made, counted = run(model, ways[name], given, 16 if index == 0 else options.max_new_tokens, options, index)
            if index:  # the first round warms up
                runs[name].append(made)
                stats[name].append(counted)
    points = [point(model, int(name), runs, stats, drafter) for name in ways if name != PLAIN]
    rows = [["draft nodes", "x own plain", "95 %", "mu", "mu expected", "predicted", "by calibration"]]
    for one in points:
        ratio = one["speedup"]
        interval = f"[{ratio['low']:.2f}, {ratio['high']:.2f}]"
        shown = [f"{one[key]:.2f}" for key in ("mu", "expected", "predicted", "by_calibration")]
        rows.append([str(one["nodes"]), f"{ratio['value']:.2f}x", interval, *shown])
    print(columns(rows))
    trace = long_text(model, inputs[-1], options)
    print(*trace["decisions"], sep="\n")
    print(quiet_words(watch.others()))
    machine = machine_facts(model.backbone.device, model.backbone.dtype)
    write_json(options.output / "tree-sizes.json", {"points": points, "trace": trace, "machine": machine})
    save_plot(draw_sizes, {"points": points}, options.output / "tree-sizes.png", columns=1)
    save_plot(draw_trace, trace, options.output / "controller.png", columns=1)


def point(
    model: Any, nodes: int, runs: dict[str, list[Run]], stats: dict[str, list[DecodingStats]], drafter: HeadsDrafter
) -> dict[str, Any]:
    """What was measured of trees of a size, and what follows from T(N)."""
    assert drafter.values is not None
    total, plain = merged(stats[str(nodes)]), merged(stats[PLAIN])
    beside = (
        sum(seconds for phase, seconds in total.seconds.items() if phase not in ("prefill", "verify")) / total.passes
    )
    rest = sum(seconds for phase, seconds in plain.seconds.items() if phase not in ("prefill", "verify")) / plain.passes
    times = model.speculation.times(model.backbone).table(256)
    interpolated = model.speculation.times(model.backbone).seconds
    expected = expected_accepted(drafter.values, nodes)[-1]
    ratio = (times[1] + rest) / (interpolated(nodes + 1, 256) + beside)
    return {
        "nodes": nodes,
        "speedup": speed_ratio(runs[str(nodes)], runs[PLAIN])._asdict(),
        "mu": total.mu,
        "expected": expected,
        "predicted": total.tau * ratio,
        "by_calibration": (1 + expected) * ratio,
    }


def long_text(model: Any, given: dict[str, Any], options: Any) -> dict[str, Any]:
    """N and tokens gained of every pass of one long answer, and the decisions."""
    out = model.generate(
        **given,
        do_sample=False,
        min_new_tokens=options.long,
        max_new_tokens=options.long,
        speculation="auto",
        return_dict_in_generate=True,
    )
    stats = out.stats
    decisions = [{"token": d.token, "drafting": d.drafting, "text": str(d)} for d in stats.decisions]
    return {
        "nodes": stats.nodes,
        "gained": stats.spans[1:],
        "decisions": [d["text"] for d in decisions],
        "changes": decisions,
    }


def draw_sizes(axes: Any, figures: dict[str, Any]) -> bool:
    """Measured and predicted speed-ups by tree size."""
    axis, points = (axes[0] if hasattr(axes, "__len__") else axes), figures["points"]
    nodes = [point["nodes"] for point in points]
    value = [point["speedup"]["value"] for point in points]
    low = [point["speedup"]["value"] - point["speedup"]["low"] for point in points]
    high = [point["speedup"]["high"] - point["speedup"]["value"] for point in points]
    axis.errorbar(nodes, value, yerr=[low, high], fmt="o-", label="measured")
    axis.plot(nodes, [point["predicted"] for point in points], "--", label="predicted from T(N), tau as seen")
    axis.plot(nodes, [point["by_calibration"] for point in points], ":", label="predicted, tau by the calibration")
    axis.axhline(1.0, color="grey", linewidth=0.5)
    axis.set(xscale="log", xlabel="draft nodes of the static tree", ylabel="times own plain decoding")
    axis.set_xticks(nodes, [str(node) for node in nodes])
    axis.minorticks_off()
    axis.legend()
    return True


def draw_trace(axes: Any, figures: dict[str, Any]) -> bool:
    """N and tokens gained along a text; grey where nothing was drafted by decision."""
    axis = axes[0] if hasattr(axes, "__len__") else axes
    tokens = list(accumulate(figures["gained"], initial=1))
    smooth = {name: [] for name in ("nodes", "gained")}  # type: dict[str, list[float]]
    for end in range(1, len(figures["nodes"]) + 1):
        for name, means in smooth.items():
            part = figures[name][max(0, end - SMOOTH) : end]
            means.append(sum(part) / len(part))
    axis.plot(tokens[1:], smooth["nodes"], label=f"N, mean of {SMOOTH} passes")
    axis.plot(tokens[1:], smooth["gained"], label="tokens gained per pass")
    changes = [*figures["changes"], {"token": tokens[-1], "drafting": True}]
    for change, following in zip(changes, changes[1:], strict=False):
        if not change["drafting"]:
            axis.axvspan(change["token"], following["token"], color="grey", alpha=0.3)
    axis.set(xlabel="new tokens (grey: plain by decision)", ylabel="per pass")
    axis.legend()
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help="JSON lines with prompt, turns or messages")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--heads", help="folder, packaged name or hub id")
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--long", type=int, default=1200, help="tokens of the long text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    return parser


if __name__ == "__main__":
    main()
