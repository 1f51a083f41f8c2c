"""One way to decode, in a process of its own: loads it, then answers requests, one JSON line each.

python benchmarks/peers_worker.py WAY.py SETTINGS

`WAY.py` has `load(settings)`, which gives a `Decoder`. The first line out tells its facts and says that it is loaded;
after that each line in, `{"ids": [...], "max_new_tokens": n}`, is answered by a line with tokens, seconds and counters.
Knows no way to decode and imports the standard library alone, since other engines' environments run it, too.
"""

import importlib.util
import json
import os
import sys
import time
from typing import Any, Protocol


class Decoder(Protocol):
    """What `load` gives."""

    facts: dict[str, Any]
    """Told once: `engine`, its name and version, at least."""

    def generate(self, ids: list[int], max_new_tokens: int) -> Any:
        """Decodes greedily; this call alone is timed."""

    def read(self, output: Any) -> dict[str, Any]:
        """Of what `generate` gave: `tokens`, the new ids, and `counters`.

        Counters are `passes` of the target after the prompt's and tokens `gained` in them, `drafts` (passes with a
        draft) and `accepted` draft tokens; None for what the way does not tell.
        """


def main(way: str, settings: str) -> None:
    """Serves until the input ends.

    Args:
        way: File of the module.
        settings: JSON for its `load`.
    """
    # Engines print as they like: what they print goes to the log, and lines of the protocol where output went before.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spec = importlib.util.spec_from_file_location("way", way)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    decoder: Decoder = module.load(json.loads(settings))
    print(json.dumps({"facts": decoder.facts}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        output = decoder.generate(request["ids"], request["max_new_tokens"])
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds} | decoder.read(output)), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
