"""A comparison with other engines as plain text and as a picture. Computes nothing."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from medusa_spec.comparison_table import columns
from medusa_spec.machine import quiet_words

NONE = "–"
COLOURS = {"hf": "Greys", "vllm": "Blues", "ours": "Oranges"}
"""Of families: ways of one family are shades of one colour."""


def table(result: dict[str, Any]) -> str:
    """Overall figures, then by category: speeds, both ratios, μ; then what it was measured on."""
    blocks = [_overall(result)]
    if len(result["by_category"]) > 1:
        blocks += [
            _by_category(result, "tokens/s", lambda way, group: f"{way['tokens_per_second']:.1f}"),
            _by_category(result, "times HF generate", lambda way, group: _times(way["times_hf"], group)),
        ]
        if result["all"]["best_vllm"]:
            by = _by_category(result, "times vLLM's best", lambda way, group: _times(way["times_best_vllm"], group))
            blocks.append(by)
        blocks.append(_by_category(result, "mu", lambda way, group: _number(way["mu"])))
    return "\n\n".join([*blocks, _machine(result)])


def _overall(result: dict[str, Any]) -> str:
    group, labels = result["all"], result["labels"]
    of = {"times HF generate": "times_hf"} | ({"times vLLM's best": "times_best_vllm"} if group["best_vllm"] else {})
    rows = [["all prompts", "tokens/s", *of, "mu", "tau", "own plain's", "HF's"]]
    for name, way in group["ways"].items():
        ratios = [_times(way[ratio], group) for ratio in of.values()]
        equal = [_share(way[other], group) for other in ("equal_to_own_plain", "equal_to_hf")]
        speed = f"{way['tokens_per_second']:.1f}"
        rows.append([labels[name], speed, *ratios, _number(way["mu"]), _number(way["tau"]), *equal])
    note = "(own plain's, HF's: outputs equal to those, token for token; mu, tau: of what the way tells)"
    if group["best_vllm"]:
        note += f"\nvLLM's best way, chosen on these prompts: {labels[group['best_vllm']]}."
    left = [f"Left out: {label}: {reason}" for label, reason in result["left_out"].items()]
    return "\n".join([f"{group['prompts']} prompts", columns(rows), note, *left])


def _by_category(result: dict[str, Any], title: str, cell: Callable[[dict[str, Any], dict[str, Any]], str]) -> str:
    groups = result["by_category"]
    rows = [[title, *(name or "-" for name in groups)]]
    for name in result["all"]["ways"]:
        cells = [cell(group["ways"][name], group) for group in groups.values()]
        if set(cells) != {NONE}:
            rows.append([result["labels"][name], *cells])
    if "vLLM" in title:
        rows.append(["(which that is)", *(result["labels"][group["best_vllm"]] for group in groups.values())])
    return columns(rows)


def _machine(result: dict[str, Any]) -> str:
    facts = result["machine"]
    lines = [f"{name}: {value}" for name, value in result["settings"].items() if value is not None]
    lines += [f"{name}: {engine}" for name, engine in result["engines"].items()]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    lines.append(f"{facts['cpu']}, {facts['dtype']}, {facts['threads']} threads of {facts['cores']} cores, {versions}")
    lines.append(f"revision {facts['revision'] or 'unknown'}")
    return "\n".join([*lines, quiet_words(result["busy_cores_elsewhere"])])


def _times(ratio: dict[str, float] | None, group: dict[str, Any]) -> str:
    if ratio is None:
        return NONE
    if group["prompts"] < 2 or ratio["low"] == ratio["high"]:
        return f"{ratio['value']:.2f}"  # nothing to resample, or compared with itself
    return f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _share(equal: int | None, group: dict[str, Any]) -> str:
    return NONE if equal is None else f"{equal}/{group['prompts']}"


def draw(result: dict[str, Any], path: Path) -> bool:
    """Writes speeds by category as PNG.

    Returns:
        Whether it was written: not without matplotlib.
    """
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(11, 5), layout="constrained")
    _bars(figure.subplots(), result)
    figure.savefig(path, format="png", dpi=120)
    return True


def _bars(axes: Any, result: dict[str, Any]) -> None:
    from matplotlib import colormaps

    groups = result["by_category"] | {"all": result["all"]}
    ways = list(result["all"]["ways"])
    width = 0.85 / len(ways)
    for number, name in enumerate(ways):
        family = [way for way in ways if way.split("-")[0] == name.split("-")[0]]
        shade = 0.35 + 0.6 * (family.index(name) + 1) / len(family)
        speeds = [group["ways"][name]["tokens_per_second"] for group in groups.values()]
        at = [place + (number - (len(ways) - 1) / 2) * width for place in range(len(groups))]
        colour = colormaps[COLOURS[name.split("-")[0]]](shade)
        axes.bar(at, speeds, width, label=result["labels"][name], color=colour)
    axes.set_xticks(range(len(groups)), [name or "-" for name in groups])
    axes.set(ylabel="tokens per second")
    axes.legend(fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False)
