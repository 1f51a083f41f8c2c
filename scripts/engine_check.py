"""Decodes the same prompts with this project and with vLLM, from the same heads, and compares tokens and counters.

Run by `scripts/engine_check.sh`, which makes vLLM's environment. Both decode greedily in float32; this project's tree
is the chain of every head's first guess, which is what engines draft. What is compared:

    tokens               of every text
    drafts               target passes that had a draft to check. The prompt's own pass has none, in both.
    draft tokens         guesses in them, K each
    accepted at 1 … K    how often the guess at that place was right and all before it, before a text is cut at its end
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from medusa_spec import DecodingStats, MedusaModel, export_heads
from medusa_spec.cli.export import METHODS, PROPOSER_CLASS
from medusa_spec.export import FORMATS
from medusa_spec.prompts import encode, packaged_prompts, read_prompts
from medusa_spec.tree import chain_template

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one engine did with all prompts.

    Attributes:
        engine: Its name and version.
        method: How it drafts.
        processes: Over how many processes the target was spread.
        tokens: Emitted ids by prompt.
        drafts: Target passes with a draft.
        draft_tokens: Guesses in them.
        per_position: Accepted guesses by place.
    """

    engine: str
    method: str
    processes: int
    tokens: list[list[int]]
    drafts: int
    draft_tokens: int
    per_position: list[int]

    @property
    def counters(self) -> tuple[int, int, list[int]]:
        """What has to be equal beside the tokens."""
        return self.drafts, self.draft_tokens, self.per_position


def counters_of(stats: DecodingStats, guesses: int) -> tuple[int, int, list[int]]:
    """The counters of this project's decoder as engines name them."""
    nodes = sum((size - 1) * passes for size, passes in stats.pass_sizes.items())
    accepted = list(stats.accepted_by_depth) + [0] * (guesses - len(stats.accepted_by_depth))
    return stats.drafted_passes, nodes, accepted


def decode_here(model: MedusaModel, prompts: list[list[int]], max_new_tokens: int, method: str, guesses: int) -> Run:
    """This project's run."""
    tokens, stats = [], DecodingStats()
    for ids in prompts:
        out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=max_new_tokens)
        tokens.append(out[0, len(ids) :].tolist())
        assert model.last_stats is not None
        stats = stats.merge(model.last_stats)
    drafts, draft_tokens, per_position = counters_of(stats, guesses)
    return Run(
        engine="medusa-spec",
        method=f"{method}, chain of {guesses}",
        processes=1,
        tokens=tokens,
        drafts=drafts,
        draft_tokens=draft_tokens,
        per_position=per_position,
    )


def decode_there(python: str, job: dict[str, Any], method: str, log: Path) -> Run:
    """The engine's run, in its own environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound to a core that something else uses it takes minutes
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": job.get("path", ""),
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        job_file, result_file = Path(folder) / "job.json", Path(folder) / "result.json"
        job_file.write_text(json.dumps(job))
        with open(log, "w", encoding="utf-8") as told:
            command = [python, str(HERE / "engine_check_vllm.py"), str(job_file), str(result_file)]
            code = subprocess.run(command, env=environment, stdout=told, stderr=subprocess.STDOUT).returncode
        if code or not result_file.is_file():
            sys.exit(f"the engine ended with {code}; the end of {log}:\n{log.read_text()[-3000:]}")
        return Run(method=method, processes=job["processes"], **json.loads(result_file.read_text()))


def table(runs: Sequence[tuple[Run, Run]]) -> str:
    """Runs beside what they are compared with, as a Markdown table."""
    lines = [
        "| engine | drafts by | processes | equal texts | drafts | draft tokens | accepted at 1, 2, … | μ |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run, ours in runs:
        equal = sum(one == other for one, other in zip(run.tokens, ours.tokens, strict=True))
        accepted = sum(run.per_position)
        lines.append(
            f"| {run.engine} | {run.method} | {run.processes} | {equal} of {len(run.tokens)} | {run.drafts} | "
            f"{run.draft_tokens} | {', '.join(map(str, run.per_position)) or '–'} | "
            f"{accepted / run.drafts if run.drafts else 0:.3f} |"
        )
    return "\n".join(lines)


def differences(run: Run, ours: Run) -> list[str]:
    """What is not equal, in words; counters only where the engine drafted."""
    which = f"{run.engine}, {run.method}, {run.processes} processes"
    found = [
        f"{which}: text {number} differs from token {_first(one, other)} on"
        for number, (one, other) in enumerate(zip(run.tokens, ours.tokens, strict=True))
        if one != other
    ]
    if run.drafts and run.counters != ours.counters:
        found.append(f"{which}: drafts, draft tokens and accepted must be {ours.counters}, got {run.counters}")
    return found


def _first(one: list[int], other: list[int]) -> int:
    places = range(min(len(one), len(other)))
    return next((place for place in places if one[place] != other[place]), len(places))


def jobs_of(model: MedusaModel, work: Path, by: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Exports a model's heads in every way that engines read, and gives vLLM's settings by what to call them."""
    assert model.heads is not None
    kind, found = model.heads.config.kind, {}
    for to in by:
        if kind not in FORMATS[to]:
            continue
        folder = export_heads(model, work / f"{kind}-{to}", to=to).folder
        method, path = (METHODS[kind], str(folder)) if to == "vllm" else ("custom_class", PROPOSER_CLASS)
        speculative = {"method": method, "model": path, "num_speculative_tokens": model.heads.config.num_heads}
        found[f"{kind}, `{method}`"] = {"speculative": speculative, "path": "" if to == "vllm" else str(folder)}
    return found


def check(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """Runs all of it: the table, and what was not equal."""
    runs: list[tuple[Run, Run]] = []
    arguments.work.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(arguments.heads):
        model = MedusaModel.from_pretrained(name, dtype=torch.float32)
        assert model.heads is not None
        kind, guesses, target = model.heads.config.kind, model.heads.config.num_heads, str(model.target.name_or_path)
        jobs = jobs_of(model, arguments.work, arguments.by)
        # Where the format cannot keep a draft vocabulary, what was exported is what both have to decode with.
        heads = arguments.work / "eagle-vllm" if kind == "eagle" and model.heads.draft_ids is not None else name
        model = MedusaModel.from_pretrained(
            target, heads=heads, tree=chain_template(guesses), speculation="fixed", dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(target)
        read = read_prompts(arguments.prompts, limit=arguments.limit)
        prompts = [encode(tokenizer, prompt.messages)["input_ids"][0].tolist() for prompt in read]
        ours = decode_here(model, prompts, arguments.max_new_tokens, kind, guesses)
        runs.append((ours, ours))
        todo = [(label, job, processes) for label, job in jobs.items() for processes in arguments.processes]
        if number == 0:
            todo.insert(0, ("no drafts", {"speculative": None}, 1))
        for place, (label, job, processes) in enumerate(todo):
            job |= {"model": target, "prompts": prompts, "max_new_tokens": arguments.max_new_tokens}
            log = arguments.work / f"{kind}-{place}.log"
            there = decode_there(arguments.engine_python, job | {"processes": processes}, label, log)
            runs.append((there, ours))
            print(table(runs[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    return table(runs), [text for run, ours in runs for text in differences(run, ours)]


def main() -> None:
    """Prints the table; ends with 1 if something is not equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="+", help="folders of heads that name their target")
    parser.add_argument("--engine-python", required=True, help="Python of the environment that has vLLM")
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1], help="spread the target over so many; one run each"
    )
    parser.add_argument(
        "--by", nargs="+", choices=["vllm", "vllm-class"], default=["vllm", "vllm-class"], help="exports"
    )
    parser.add_argument("--prompts", type=Path, default=packaged_prompts(), help="JSON lines; default: packaged ones")
    parser.add_argument("--limit", type=int, default=6, help="prompts to decode")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--work", type=Path, required=True, help="folder for exports and the engine's log")
    text, found = check(parser.parse_args())
    print(text)
    for line in found:
        print(line, file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
