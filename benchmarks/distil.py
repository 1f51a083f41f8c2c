"""Tokens a second of self-distillation: Hugging Face's generate in batches, on plain and on packed layers, and ours.

python benchmarks/distil.py PROMPTS [--limit 112] [--batch 56] [--new-tokens 224] [--hf-batch 32] [--hf-limit 32]

The answers are greedy, ended by EOS or at --new-tokens; reading the prompts is in the time. All ways answer the
same kind of prompts, Hugging Face fewer (--hf-limit), since it is slower. Ends with one JSON line.
"""

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from medusa_spec.backbone import Backbone
from medusa_spec.batch import Text, decode_batch
from medusa_spec.comparison_table import columns
from medusa_spec.default_model import default_model_path
from medusa_spec.machine import LoadWatch, machine_facts, quiet_words
from medusa_spec.prepare import prepare
from medusa_spec.prompts import encode, read_prompts


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the three ways and print a table."""
    options = _parser().parse_args(arguments)
    disable_progress_bar()
    name = options.model or str(default_model_path())
    tokenizer = AutoTokenizer.from_pretrained(name)
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).eval().requires_grad_(False)
    prompts = [encode(tokenizer, p.messages)["input_ids"][0].tolist() for p in read_prompts(options.prompts)]
    backbone, eos, load = Backbone(model), frozenset([int(tokenizer.eos_token_id)]), LoadWatch()
    few, pad = prompts[: options.hf_limit], int(tokenizer.pad_token_id or tokenizer.eos_token_id)
    plain = lambda: hugging_face(model, few, options, eos, pad)  # noqa: E731
    ways: dict[str, tuple[bool, Callable[[], int]]] = {
        "Hugging Face": (False, plain),
        "Hugging Face, packed layers": (True, plain),
        "this project": (True, lambda: side_by_side(backbone, prompts[: options.limit], options, eos)),
    }
    found = {}
    for way, (packed, run) in ways.items():
        with packing(backbone, packed):
            began = time.perf_counter()
            tokens = run()
            found[way] = tokens / (time.perf_counter() - began)
    rows = [["", "tokens/s"], *([way, f"{speed:.0f}"] for way, speed in found.items())]
    print(columns(rows))
    print(quiet_words(load.others()), end="\n\n")
    if note := load.note():
        print(note)
    print(json.dumps({"tokens_per_second": found, **machine_facts(backbone.device, backbone.dtype)}))


@contextmanager
def packing(backbone: Backbone, packed: bool) -> Iterator[None]:
    """Within it the target is prepared, or plain."""
    prepared = prepare(backbone.model, backbone.lm_head) if packed else None
    try:
        yield
    finally:
        if prepared is not None:
            prepared.undo()


def hugging_face(
    model: Any, prompts: list[list[int]], options: argparse.Namespace, eos: frozenset[int], pad: int
) -> int:
    """Tokens written by generate in batches padded on the left, in order of length."""
    tokens, ordered = 0, sorted(prompts, key=len)
    for start in range(0, len(ordered), options.hf_batch):
        rows = ordered[start : start + options.hf_batch]
        width = max(map(len, rows))
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=options.new_tokens, do_sample=False, pad_token_id=pad
        )
        for row in out[:, width:].tolist():
            tokens += next((place + 1 for place, token in enumerate(row) if token in eos), len(row))
    return tokens


def side_by_side(backbone: Backbone, prompts: list[list[int]], options: argparse.Namespace, eos: frozenset[int]) -> int:
    """Tokens written by `decode_batch`."""
    texts = deque(Text(key=n, prompt=ids, new_tokens=options.new_tokens) for n, ids in enumerate(prompts))
    return sum(len(text.tokens) for text in decode_batch(backbone, texts, batch=options.batch, eos_ids=eos))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", help="JSON lines with prompt, turns or messages")
    parser.add_argument("--model", help="folder or hub id; default: the default model")
    parser.add_argument("--limit", type=int, default=112, help="prompts that this project answers")
    parser.add_argument("--batch", type=int, default=56, help="texts side by side")
    parser.add_argument("--hf-limit", type=int, default=32, help="prompts that Hugging Face answers")
    parser.add_argument("--hf-batch", type=int, default=32, help="rows of its batches")
    parser.add_argument("--new-tokens", type=int, default=224, help="longest answer")
    return parser


if __name__ == "__main__":
    main()
