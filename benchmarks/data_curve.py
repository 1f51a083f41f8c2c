"""How much data buys how much μ: heads trained on 1/16, 1/8, … all of a run's answers, measured on the same held-out.

python benchmarks/data_curve.py RUN --output curve [--kind hydra] [--num-heads 4] [--sizes 100k 200k 400k all]
    [--epochs 6] [--least-steps 600] [--most-epochs 24] [--settings '{"learning_rate": 0.002}']

RUN is a folder whose data and states stages are finished; nothing in it is written. Families that attend need a run of
whole texts (one whose `kind` attends). Every size is a folder of its own in --output, with heads that can be loaded;
stopped, the same command goes on where it was. curve.json and curve.png are written anew after every size.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_spec.comparison_table import columns
from medusa_spec.files import write_json
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.curve import halvings, measure_point, run_settings
from medusa_spec.finetune.curve_plot import TREES, draw_curve
from medusa_spec.finetune.target import Target
from medusa_spec.machine import LoadWatch, machine_facts

UNITS = {"k": 1_000, "m": 1_000_000}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure size after size, smallest first, and print a table."""
    options = _parser().parse_args(arguments)
    config = FinetuneConfig(data=("unused",), **run_settings(options.run), **asked(options))
    target, points, load = Target(config), [], LoadWatch()
    available = halvings(options.run, 1)[0]
    sizes = halvings(options.run) if options.sizes is None else [_tokens(text, available) for text in options.sizes]
    options.output.mkdir(parents=True, exist_ok=True)
    for tokens in sorted({min(size, available) for size in sizes}):
        point = measure_point(
            config,
            target,
            tokens,
            options.output / str(tokens),
            least_steps=options.least_steps,
            most_epochs=options.most_epochs,
        )
        points.append(point)
        print(json.dumps({key: value for key, value in point.items() if key not in ("expected_mu", "top1_by_epoch")}))
        record = {
            "run": options.run.name,
            "settings": asked(options),
            "least_steps": options.least_steps,
            "most_epochs": options.most_epochs,
            "busy_cores_elsewhere": load.others(),
            "machine": machine_facts(target.backbone.device, target.backbone.dtype),
            "points": points,
        }
        write_json(options.output / "curve.json", record)
        draw_curve(points, options.output / "curve.png")
    print(table(points))


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """Settings of the recipe that were given; the others keep the default."""
    named = {name: getattr(options, name) for name in ("kind", "num_heads", "epochs")}
    return {**{name: value for name, value in named.items() if value is not None}, **options.settings}


def table(points: Sequence[dict[str, Any]]) -> str:
    """The points as text, a line each."""
    trees = [size for size in TREES if all(size < len(point["expected_mu"]) for point in points)]
    rows = [
        [
            "answer tokens",
            "with prompts",
            "epochs",
            "steps",
            "seconds",
            *(f"μ({size})" for size in trees),
            "top-1 by head",
        ]
    ]
    for point in points:
        seconds = "resumed" if point["seconds"] is None else f"{point['seconds']:.0f}"
        expected = [f"{point['expected_mu'][size]:.3f}" for size in trees]
        accuracy = " ".join(f"{share:.3f}" for share in point["top1"])
        rows.append(
            [
                f"{point['answer_tokens']:,}",
                f"{point['tokens']:,}",
                str(point["epochs"]),
                str(point["steps"]),
                seconds,
                *expected,
                accuracy,
            ]
        )
    return columns(rows)


def _tokens(text: str, available: int) -> int:
    if text == "all":
        return available
    unit = UNITS.get(text[-1].lower())
    return int(float(text[:-1]) * unit) if unit else int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run whose data and states are finished")
    parser.add_argument("--output", type=Path, required=True, help="folder for the points")
    parser.add_argument("--kind", help="family of heads")
    parser.add_argument("--num-heads", type=int, help="K")
    parser.add_argument("--sizes", nargs="+", help="answer tokens, like 100000, 100k, 1.5m or all; default: halvings")
    parser.add_argument("--epochs", type=int, help="passes over the data, at least")
    parser.add_argument("--least-steps", type=int, default=600, help="more passes over few data, up to so many steps …")
    parser.add_argument("--most-epochs", type=int, default=24, help="… but not more passes than these")
    parser.add_argument("--settings", type=json.loads, default={}, help="other settings of the recipe, as JSON")
    return parser


if __name__ == "__main__":
    main()
