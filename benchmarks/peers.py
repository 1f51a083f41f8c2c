"""Speed of this project beside Hugging Face's generate and vLLM, on the same weights and prompts; one JSON line last.

python benchmarks/peers.py PROMPTS [--per-category N] [--heads NAME] [--engine-python PYTHON] … (--help)

Run by `scripts/peers.sh`, which makes vLLM's environment. Every way to decode is a process of its own that loads the
weights in bfloat16 and then answers one prompt at a time, greedily; the others are stopped meanwhile. Their order
rotates from prompt to prompt. Seconds are those of the call that decodes, prompt included, taken in its process. A
way that does not load, or that ends, is left out, and the table says why. Of conversations the first turn is asked.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peers_figures import BASELINE, Record, figures
from peers_process import Load, PeerError, Way, Worker
from peers_table import draw, table
from peers_ways import ways
from transformers import AutoTokenizer, GenerationConfig

from medusa_spec.checkpoint import packaged_heads
from medusa_spec.cli.loading import DEFAULT_HEADS
from medusa_spec.default_model import DEFAULT_MODEL, default_model_path
from medusa_spec.figures import Run
from medusa_spec.files import write_text
from medusa_spec.machine import machine_facts
from medusa_spec.measure import WARM_UP_TOKENS, cut_after_eos
from medusa_spec.prompts import Prompt, as_prompt, encode, read_prompts

WARM_UP = "Count from one to ten. Then count from one to ten again. Then say in a few words what you have done."
"""Decoded first, uncounted. None of the prompts: some ways remember earlier texts."""


class Conductor:
    """Asks one way after another; drops those that fail.

    Args:
        found: The ways.
        folder: Of the workers' logs.
        timeout: Seconds that one answer may take.
    """

    def __init__(self, found: Sequence[Way], folder: Path, timeout: float) -> None:
        self.workers: dict[str, Worker] = {}
        self.left_out: dict[str, str] = {}
        self.folder, self.timeout = folder, timeout
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for way in found:
                self._start(way)
        except BaseException:
            self.close()
            raise

    def _start(self, way: Way) -> None:
        print(f"loading: {way.label}", file=sys.stderr, flush=True)
        try:
            self.workers[way.name] = Worker(way, self.folder / f"{way.name}.log", self.timeout)
        except PeerError as error:
            self._leave_out(way, error)

    def _leave_out(self, way: Way, error: PeerError) -> None:
        print(f"left out: {way.label}: {error}", file=sys.stderr, flush=True)
        self.left_out[way.label] = str(error)

    def ask(self, index: int, ids: list[int], max_new_tokens: int) -> dict[str, dict[str, Any]]:
        """Answers by way, asked in an order that the index rotates."""
        names = list(self.workers)
        turn = index % max(len(names), 1)
        answers = {}
        for name in names[turn:] + names[:turn]:
            try:
                answers[name] = self.workers[name].ask(ids, max_new_tokens)
            except PeerError as error:
                worker = self.workers.pop(name)
                worker.close()
                self._leave_out(worker.way, error)
        return answers

    def close(self) -> None:
        """Ends all."""
        for worker in self.workers.values():
            worker.close()


def measure(
    conductor: Conductor, asked: Sequence[tuple[Prompt, list[int]]], warm_up: list[int], max_new_tokens: int, eos: Any
) -> tuple[list[Record], float | None]:
    """Records of all prompts with the ways that lasted to the end, and the cores that others kept busy."""
    conductor.ask(0, warm_up, min(WARM_UP_TOKENS, max_new_tokens))
    load, answers = Load(conductor.workers.values()), []
    for index, (_, ids) in enumerate(asked):
        answers.append(conductor.ask(index, ids, max_new_tokens))
        print(f"prompt {index + 1} of {len(asked)}", file=sys.stderr, flush=True)
    others, records = load.others(), []
    for (prompt, _), answer in zip(asked, answers, strict=True):
        of = {name: answer[name] for name in conductor.workers}
        runs = {name: Run(cut_after_eos(one["tokens"], eos), one["seconds"]) for name, one in of.items()}
        counters = {name: one["counters"] for name, one in of.items()}
        records.append(Record(name=prompt.name, category=prompt.category, runs=runs, counters=counters))
    return records, others


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs all of it: the figures, and what they were measured on and with."""
    model = arguments.model or str(default_model_path())
    if arguments.heads is None and arguments.model is None and DEFAULT_HEADS in packaged_heads():
        arguments.heads = DEFAULT_HEADS
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = read_prompts(arguments.prompts, limit=arguments.limit, per_category=arguments.per_category)
    asked = [(prompt, encode(tokenizer, prompt.messages)["input_ids"][0].tolist()) for prompt in prompts]
    warm_up = encode(tokenizer, as_prompt(WARM_UP).messages)["input_ids"][0].tolist()
    found = ways(arguments, model, max(len(ids) for ids in (warm_up, *(ids for _, ids in asked))))
    conductor = Conductor(found, arguments.work, arguments.timeout)
    try:
        records, others = measure(conductor, asked, warm_up, arguments.max_new_tokens, _eos_ids(model))
        labels = {way.name: way.label for way in found}
        engines = {worker.way.family: worker.facts["engine"] for worker in conductor.workers.values()}
    finally:
        conductor.close()
    if BASELINE not in engines:
        sys.exit(f"Hugging Face's generate is what all is compared with; it was left out: {conductor.left_out}")
    torch.set_num_threads(arguments.threads)  # so that it is told
    told = machine_facts(torch.device("cpu"), torch.bfloat16) | {"cpu": _cpu()}
    named = {"model": arguments.model or DEFAULT_MODEL, "heads": arguments.heads, "prompts": arguments.prompts.name}
    medusa = arguments.medusa_heads and arguments.medusa_heads.name
    named |= {"max_new_tokens": arguments.max_new_tokens, "medusa_heads": medusa}
    left_out = conductor.left_out | _not_tried(arguments)
    result = {"settings": named, "machine": told, "busy_cores_elsewhere": others, "engines": engines}
    return result | {"labels": labels, "left_out": left_out} | figures(records, seed=arguments.seed)


def _not_tried(arguments: argparse.Namespace) -> dict[str, str]:
    """Ways that were not asked for because something was not given."""
    found = {}
    if arguments.engine_python is None:
        found["vLLM"] = "no environment that has it (--engine-python; scripts/peers.sh makes one)"
    elif arguments.medusa_heads is None:
        found["vLLM Medusa"] = "no --medusa-heads, an export of Medusa heads for this model"
    if arguments.heads is None:
        found["this project, heads"] = "no --heads for this model"
    return {} if arguments.ways else found


def _eos_ids(model: str) -> frozenset[int]:
    ids = GenerationConfig.from_pretrained(model).eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())


def _cpu() -> str:
    """The processor's name and the widest vectors it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "cpu"
    facts = {line.split(":")[0].strip(): line.split(":", 1)[1].strip() for line in lines if ":" in line}
    flags = facts.get("flags", "").split()
    kinds = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
    return ", ".join([facts.get("model name", "cpu"), *[kind for kind in kinds if kind in flags][:1]])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("prompts", type=Path, help="JSON lines with prompt, turns or messages, and category")
    add("--model", help="folder or hub id; default: the default model")
    add("--heads", help="folder, packaged name or hub id; default: those packaged for the default model")
    add("--medusa-heads", type=Path, help="folder of `medusa-spec export --to vllm`, of Medusa heads")
    add("--engine-python", help="Python of the environment that has vLLM; without it vLLM is left out")
    add("--ways", nargs="+", metavar="WAY", help="only these: hf, hf-lookup, vllm, vllm-ngram, ours, ours-heads, …")
    add("--limit", type=int, help="prompts to decode, in turn from all categories")
    add("--per-category", type=int, help="most prompts of each category")
    add("--max-new-tokens", type=int, default=128)
    add("--threads", type=int, default=2, help="of each way")
    add("--early-exit", type=int, default=10, help="layers that Hugging Face's early exit drafts with")
    add("--vllm-eager", action="store_true", help="vLLM without torch.compile: loads sooner, decodes more slowly")
    add("--timeout", type=float, default=900, help="seconds that a way may take to load or answer")
    add("--seed", type=int, default=0, help="of the bootstrap")
    add("--work", type=Path, default=Path(".build/peers"), help="folder for the workers' logs")
    add("--json", type=Path, help="also write the JSON line here")
    add("--plot", type=Path, help="write speeds by category here, as PNG")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, then the JSON line."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that workers are ended, too
    result = compare(options)
    print(table(result), end="\n\n")
    print(json.dumps(result))
    if options.json is not None:
        write_text(options.json, json.dumps(result) + "\n")
    if options.plot is not None and not draw(result, options.plot):
        print("no picture: matplotlib is not there (pip install medusa-spec[report])", file=sys.stderr)


if __name__ == "__main__":
    main()
