"""Speed of tree decoding, of plain decoding and of Hugging Face's generate; one JSON line last.

python benchmarks/speed.py [MODEL] [--heads NAME] [--prompts FILE] [--limit N] … (--help)

The same measurement as `medusa-spec bench`, without the command-line extra's packages.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from medusa_spec.cli.bench import bench
from medusa_spec.files import write_text


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, then the JSON line."""
    options = vars(_parser().parse_args(arguments))
    file = options.pop("json")
    comparison = bench(**options)
    print(comparison.table(), end="\n\n")
    print(comparison.to_json())
    if file is not None:
        write_text(file, comparison.to_json() + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("model", nargs="?", help="folder or hub id; default: the default model")
    add("--heads", help="folder, packaged name or hub id; default: the model's own, else n-grams")
    add("--drafter", help='"heads", "hybrid", or "suffix" and "ngram", which need no heads')
    add("--prompts", type=Path, help="JSON lines with prompt, turns or messages")
    add("--limit", type=int, help="prompts to decode, in turn from all categories")
    add("--per-category", type=int, help="most prompts of each category")
    add("--max-new-tokens", type=int, default=128)
    add("--draft-nodes", type=int, help="most draft nodes per pass")
    add("--speculation", choices=("auto", "fixed"), help="of the tree; default: auto")
    add("--dtype", default="auto")
    add("--temperature", type=float, default=0.0, help="all arms sample at it; 0: greedy")
    add("--seed", type=int, default=0, help="of the bootstrap and of sampling")
    add("--no-chat-template", dest="chat_template", action="store_false")
    add("--no-baseline", dest="baseline", action="store_false")
    add("--json", type=Path, help="also write the JSON line here")
    return parser


if __name__ == "__main__":
    main()
