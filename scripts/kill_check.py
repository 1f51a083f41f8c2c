"""Kill -9 at random moments of every stage, again and again: are the heads bit-equal to those of an undisturbed run?

python scripts/kill_check.py [--rounds 10] [--seed 0] [--runs self distil joint] [--keep FOLDER]

A tiny random model, three runs: `self` (the model writes prompts and answers; losses from its probabilities, so that
the teacher stage has something to do), `distil` (it answers given prompts) and `joint` (given answers; an adapter on
the target is trained with the heads). In every round each stage of a run is killed once, at a moment drawn from its
usual duration, and the run is started again; in the end the weights are compared, and no unfinished file may lie about.
Exits with 1 if any differ, or if one does. Processes are forked, so that a start costs no imports.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from medusa_spec.checkpoint import WEIGHTS_NAME
from medusa_spec.finetune import distil, selfdata
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.pipeline import STAGES, run_pipeline
from medusa_spec.testing import save_tiny_model

COMMON: dict[str, Any] = {
    "held_out": 0.1,
    "num_heads": 3,
    "draft_vocab_size": 64,
    "batch_positions": 256,
    "save_steps": 3,
    "epochs": 2,
    "dtype": "float32",
    "device": "cpu",
    "batch_tokens": 512,
    "shard_positions": 400,
    "tree_width": 4,
    "max_tree_size": 7,
    "tree_size": 7,
    "report_prompts": 2,
    "report_new_tokens": 8,
    "eval_prompts": 1,
    "eval_new_tokens": 8,
}
RUNS: dict[str, dict[str, Any]] = {
    "self": {"data": ("self",), "self_conversations": 96, "self_new_tokens": 24, "loss": "kl", "ema": 0.9},
    "distil": {"distil": True, "distil_new_tokens": 24, "kind": "hydra", "gradient_accumulation": 2},
    "joint": {"target_rank": 2, "joint_epochs": 1, "joint_batch_tokens": 512},
}
distil.SHARD = selfdata.SHARD = 24  # several shards, although there is little to write
selfdata.PROMPT_TOKENS = 96
EQUAL = "equal"
PATIENCE = 300.0
"""Seconds after which a run counts as hanging."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run undisturbed, then with kills, and compare."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    draw = random.Random(options.seed)
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch)
        wait_for(forked(lambda: prepare(folder), folder / "log.txt"), folder / "log.txt")
        for name in options.runs:
            expected, seconds = undisturbed(folder, name)
            print(f"{name}: undisturbed {expected[:16]}, seconds by stage {seconds}", flush=True)
            for number in range(options.rounds):
                config = settings(folder, name, f"round-{number}")
                hits = [kill(config, stage, draw.uniform(0, seconds[stage])) for stage in seconds]
                finish(config)
                found = verdict(config, expected)
                wrong += found != EQUAL
                print(f"{name}, round {number}: {found}; {'; '.join(hits)}", flush=True)
    print(f"{wrong} of {options.rounds * len(options.runs)} rounds ended with other weights or files left behind")
    sys.exit(1 if wrong else 0)


def prepare(folder: Path) -> None:
    """The model, and prompts with somebody's answers."""
    save_tiny_model(folder / "model", dtype=torch.float32)
    draw = random.Random(1)
    words = "red blue green cat dog house tree sun moon runs sleeps eats finds sees".split()
    lines = []
    for number in range(200):
        asked, told = (" ".join(draw.choices(words, k=draw.randint(2, 8))) for _ in range(2))
        lines.append(json.dumps({"prompt": f"{number}: {asked}", "completion": told}))
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def settings(folder: Path, name: str, run: str) -> FinetuneConfig:
    """Settings of a run of this name."""
    given = {"model": str(folder / "model"), "data": (str(folder / "prompts.jsonl"),), **COMMON, **RUNS[name]}
    return FinetuneConfig(**given, output=str(folder / name / run))


def undisturbed(folder: Path, name: str) -> tuple[str, dict[str, float]]:
    """Runs twice: what comes out, and seconds of each stage, the fewer of both: kills are to come before it is through.

    Raises:
        RuntimeError: If the two differ.
    """
    found: list[tuple[str, dict[str, float]]] = []
    for run in ("first", "second"):
        config, began = settings(folder, name, run), time.time()
        finish(config)
        found.append((digest(config), durations(config, began)))
    if found[0][0] != found[1][0]:
        raise RuntimeError(f"two undisturbed runs of {name} differ, so there is nothing to compare with")
    (expected, first), (_, second) = found
    return expected, {stage: min(first[stage], second[stage]) for stage in first}


def start(config: FinetuneConfig) -> int:
    """Runs what is left of a run in a process of its own.

    Returns:
        Its id.
    """
    return forked(lambda: run_pipeline(config), log_of(config))


def forked(work: Callable[[], Any], log: Path) -> int:
    """Does something in a copy of this process, which itself must never have started a thread: a copy has none, but
    has the locks that they held."""
    log.parent.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child:
        return child
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        work()
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 (whatever it was, the process must end here)
        print(f"failed: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)


def finish(config: FinetuneConfig) -> None:
    """Runs what is left, to the end."""
    wait_for(start(config), log_of(config))


def wait_for(child: int, log: Path) -> None:
    """Until a process has ended.

    Raises:
        RuntimeError: If it fails.
    """
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise RuntimeError(f"ended with {code}: {last_words(log)}")


def kill(config: FinetuneConfig, stage: str, after: float) -> str:
    """Starts a run, waits until it is so many seconds in a stage, and kills it with signal 9.

    Returns:
        Where it was, in words.
    """
    output, child, began = Path(config.output), start(config), time.monotonic()
    marks = [output / f"{stage}.begun.json", output / f"{stage}.done.json"]
    while not any(mark.exists() for mark in marks):
        if os.waitpid(child, os.WNOHANG)[0] or time.monotonic() - began > PATIENCE:
            raise RuntimeError(f"{output} never came to the stage {stage}: {last_words(log_of(config))}")
        time.sleep(0.001)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"{stage} {'was through' if marks[1].exists() else f'after {after * 1000:.0f} ms'}"


def log_of(config: FinetuneConfig) -> Path:
    """Where a run's words go."""
    return Path(config.output) / "log.txt"


def last_words(log: Path) -> str:
    """The end of what a run has said."""
    return log.read_text(errors="replace")[-2000:]


def durations(config: FinetuneConfig, began: float) -> dict[str, float]:
    """Seconds of each stage that the run has, from the times at which they were done."""
    found, before = {}, began
    for stage in STAGES:
        path = Path(config.output) / f"{stage}.done.json"
        if path.exists():
            found[stage], before = round(path.stat().st_mtime - before, 2), path.stat().st_mtime
    return found


def verdict(config: FinetuneConfig, expected: str) -> str:
    """What is to be said of a run that was killed and finished: `EQUAL`, or what is wrong with it."""
    if digest(config) != expected:
        return "DIFFERENT"
    left = left_behind(config)
    return f"LEFT BEHIND {', '.join(left)}" if left else EQUAL


def digest(config: FinetuneConfig) -> str:
    """Of the weights, as they are used (an adapter among them) and as they were trained."""
    output = Path(config.output)
    found = [file for file in sorted((output / "heads").rglob("*.safetensors")) if not hidden(file, output)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in [*found, output / "train" / WEIGHTS_NAME])).hexdigest()


def left_behind(config: FinetuneConfig) -> list[str]:
    """What lies in hidden folders: nobody asks for it, but whoever takes a folder as it is would get it."""
    output = Path(config.output)
    return sorted(str(path.relative_to(output)) for path in output.rglob("*") if hidden(path, output))


def hidden(path: Path, output: Path) -> bool:
    """Whether a part of its name begins with a dot."""
    return any(part.startswith(".") for part in path.relative_to(output).parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--keep", help="folder for the runs; default: one that is removed")
    return parser


if __name__ == "__main__":
    main()
