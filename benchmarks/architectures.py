"""Every causal LM of transformers: on which route trees are checked, and whether the output is exact.

    python benchmarks/architectures.py                     all of them; writes docs/architectures.md and .json
    python benchmarks/architectures.py llama mamba         only these; prints
    python benchmarks/architectures.py --update llama      only this; its line in the files is written anew

Each architecture is examined in a process of its own, so that one that crashes or hangs says so and stops no other.
"""

import argparse
import json
import os
import pickle
import resource
import select
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
import transformers  # noqa: E402
from architectures_law import Law, words_of  # noqa: E402
from architectures_table import table  # noqa: E402
from architectures_tiny import FULLY_DOUBLE, NAMES, kinds_of, tiny_model  # noqa: E402

DOCS = Path(__file__).resolve().parent.parent / "docs"
SECONDS = 180
MEMORY = 8 << 30


def examine(name: str) -> dict[str, Any]:
    """What was found of one architecture."""
    found: dict[str, Any] = {"architecture": name, "class": NAMES[name], "route": None, "kinds": [], "probe": None}
    if name in FULLY_DOUBLE:
        torch.set_default_dtype(torch.float64)
    try:
        model = tiny_model(name)
    except Exception as error:
        return {**found, "verdict": "not built", "reason": f"no tiny model: {words_of(error)}"}
    found |= {"class": type(model).__name__, "kinds": kinds_of(model)}
    try:
        law = Law(model)
        reason = law.inconsistent()
        if reason is None:
            return found | law.examine()
        found |= {"verdict": "HF inconsistent", "reason": reason}
        if "fails" not in reason:
            found |= against_cached(law, reason)
        return found
    except Exception as error:
        return {**found, "verdict": "crashed", "reason": words_of(error)}


def against_cached(law: Law, reason: str) -> dict[str, Any]:
    """What a model says with its cache must be reproduced, too, if it says something else without."""
    try:
        cached = law.examine()
    except Exception as error:
        return {"reason": f"{reason}; with its cache it could not be examined: {words_of(error)}"}
    exact = cached["verdict"] == "exact"
    outcome = "exact" if exact else f"{cached['verdict']}: {cached['reason']}"
    return {
        "verdict": "wrong" if cached["verdict"] == "wrong" else "HF inconsistent",
        "route": cached.get("route"),
        "probe": cached.get("probe"),
        "reason": f"{reason}; against plain generate with its cache: {outcome}",
    }


def guarded(name: str) -> dict[str, Any]:
    """The same in a child of this process, which may die or hang."""
    lost = {"architecture": name, "class": NAMES[name], "route": None, "kinds": [], "probe": None}
    reader, writer = os.pipe()
    began, child = time.monotonic(), os.fork()
    if child == 0:
        try:
            os.close(reader)
            _silence()
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            with os.fdopen(writer, "wb") as stream:
                pickle.dump(examine(name), stream)
        finally:  # nothing of the parent may run on in the child
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        ready, _, _ = select.select([stream], [], [], SECONDS)
        if not ready:
            os.kill(child, signal.SIGKILL)
        data = stream.read()
    _, status = os.waitpid(child, 0)
    if data:
        found = pickle.loads(data)
    else:
        reason = f"its process ended with {status}" if ready else f"no answer within {SECONDS} seconds"
        found = {**lost, "verdict": "crashed", "reason": reason}
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def _silence() -> None:
    """Libraries print and warn as they like; what counts goes through the pipe."""
    warnings.simplefilter("ignore")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="architectures; none for all")
    parser.add_argument("--update", action="store_true", help="write what was found of these into the files")
    arguments = parser.parse_args()
    names = arguments.names
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = []
    for name in names or sorted(NAMES):
        found.append(guarded(name))
        line = found[-1]
        print(f"{name}: {line['verdict']} [{line['route']}] {line['reason'] or ''} {line['seconds']} s", flush=True)
    if names and not arguments.update:
        return
    write(found, keep=bool(names))


def write(found: list[dict[str, Any]], *, keep: bool) -> None:
    """Writes the page and its JSON; with `keep`, lines of others stay as they are."""
    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    for line in found:
        del line["seconds"]  # of this run, no matter of the architecture
    if keep:
        kept = json.loads((DOCS / "architectures.json").read_text())
        if kept["versions"] != versions:
            raise SystemExit(f"the files are of {kept['versions']}, not of {versions}: examine all of them")
        names = {line["architecture"] for line in found}
        found += [line for line in kept["architectures"] if line["architecture"] not in names]
        found.sort(key=lambda line: line["architecture"])
    facts = {"versions": versions, "architectures": found}
    (DOCS / "architectures.json").write_text(json.dumps(facts, indent=1) + "\n")
    (DOCS / "architectures.md").write_text(table(facts))
    print(f"wrote {DOCS / 'architectures.md'}")


if __name__ == "__main__":
    sys.exit(main())
