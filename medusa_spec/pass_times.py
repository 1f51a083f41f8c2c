"""T(N) of a target on this machine: measured once, kept on disk, refined by what decoding sees. Knows no drafts."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import exp, log
from time import perf_counter
from typing import Any

import torch

from medusa_spec.backbone import Backbone
from medusa_spec.cost import filled_cache, interpolate, pass_timer, timed_in_turn
from medusa_spec.default_model import cache_directory
from medusa_spec.errors import CheckpointError
from medusa_spec.files import read_json, write_json
from medusa_spec.machine import machine_facts

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Pass sizes N that are measured; between them T is linear. Kernels take 6 or 14 rows at once, or 16: T has steps."""

PREFIXES = (256, 2048)
"""Prefix lengths at which they are; T is linear in the prefix, since attention is."""

SECONDS = 1.5
"""Time for each prefix, after one round that must be."""

LEAST_ROUNDS, MOST_ROUNDS = 2, 9

DRIFT, CORRECTION = 0.1, 0.02
"""How fast the speed of the machine, and that of a size beside it, follow a pass that was timed."""

OUTLIER = 2.0
"""A pass that took so many times longer, or shorter, counts as one that took that many times longer."""


class PassTimes:
    """T(N) by prefix.

    Args:
        measured: Seconds by prefix length and N.

    Attributes:
        scale: How much slower than when it was measured the machine is now; times divided by it can be compared.
    """

    def __init__(self, measured: Mapping[int, Mapping[int, float]]) -> None:
        self.measured = {prefix: dict(sorted(times.items())) for prefix, times in sorted(measured.items())}
        self.scale, self._common = 1.0, 0.0
        self._factors = dict.fromkeys(next(iter(self.measured.values())), 1.0)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The measured N."""
        return tuple(self._factors)

    def table(self, prefix: int) -> dict[int, float]:
        """Seconds by N behind `prefix` tokens, as of now."""
        return {size: self._at(size, prefix) * factor * self.scale for size, factor in self._factors.items()}

    def seconds(self, size: int, prefix: int) -> float:
        """T(N) behind `prefix` tokens, as of now."""
        return interpolate(self.table(prefix), size)

    def for_rows(self, rows: int) -> "PassTimes":
        """T(N) of passes over several rows with N nodes in each, as far as one row's times tell.

        A pass over `rows` trees does what one over as many nodes behind one prefix does, but for reading `rows`
        prefixes in place of one; what decoding sees corrects that.
        """
        tables = {prefix: self.table(prefix) for prefix in self.measured}
        return PassTimes(
            {prefix: {size: _of_nodes(times, size * rows) for size in times} for prefix, times in tables.items()}
        )

    def observe(self, size: int, prefix: int, seconds: float) -> None:
        """Is told what a pass of N nodes took."""
        ratio = log(min(max(seconds / self.seconds(size, prefix), 1 / OUTLIER), OUTLIER))
        self.scale *= exp(DRIFT * ratio)
        self._common += DRIFT * (ratio - self._common)  # what all sizes show is the machine's speed, not a size's
        right = next((known for known in self._factors if known >= size), self.sizes[-1])
        left = max((known for known in self._factors if known <= size), default=right)
        share = 1.0 if right == left else (size - left) / (right - left)
        for known, weight in ((left, 1.0 - share), (right, share)):
            self._factors[known] *= exp(CORRECTION * weight * (ratio - self._common))

    def _at(self, size: int, prefix: int) -> float:
        """As measured, on the line through the first and the last prefix; never less than at the shortest."""
        first, last = next(iter(self.measured)), next(reversed(self.measured))
        low = self.measured[first][size]
        if first == last:
            return low
        return low + max(0.0, self.measured[last][size] - low) * max(0, prefix - first) / (last - first)


def _of_nodes(times: Mapping[int, float], nodes: int) -> float:
    """T(N); beyond the last measured N a node costs what it costs there on the mean, since arithmetic is the bound."""
    last = max(times)
    return times[last] * nodes / last if nodes > last else interpolate(times, nodes)


def measure(backbone: Backbone, sizes: Sequence[int] = SIZES, prefixes: Sequence[int] = PREFIXES) -> PassTimes:
    """Measures T(N) in a few seconds: the sizes in turn, so that a machine that drifts does it to all of them."""
    longest = backbone.max_length
    room = [prefix for prefix in prefixes if longest is None or prefix + max(sizes) <= longest]
    found = {}
    for prefix in room or [max(0, (longest or 0) - max(sizes))]:
        cache = filled_cache(backbone, prefix)
        timers = {size: pass_timer(backbone, size, cache) for size in sizes}
        began = perf_counter()
        for timer in timers.values():
            timer()
        rounds = int(SECONDS / max(perf_counter() - began, 1e-9))
        # The shortest: what else runs on the machine makes a pass longer, never shorter.
        rounds = max(LEAST_ROUNDS, min(rounds, MOST_ROUNDS))
        found[prefix] = timed_in_turn(timers, rounds, warm_up=False, of=min)
    return PassTimes(found)


def pass_times(backbone: Backbone, prepared: str) -> PassTimes:
    """T(N) from the disk, or measured and put there.

    Args:
        backbone: The target.
        prepared: What was done to make it fast, in words: a part of what the times are kept by.
    """
    facts = _facts(backbone, prepared)
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_directory() / "pass-times" / f"{name}.json"
    try:
        kept = read_json(path)["seconds"]
        return PassTimes({int(p): {int(n): float(t) for n, t in times.items()} for p, times in kept.items()})
    except (CheckpointError, AttributeError, KeyError, TypeError, ValueError, StopIteration):
        pass  # not there, or of another version: measured anew
    found = measure(backbone)
    try:
        write_json(path, {"facts": facts, "seconds": found.measured})
    except OSError:
        pass  # a home that cannot be written: measured again next time
    return found


def _facts(backbone: Backbone, prepared: str) -> dict[str, Any]:
    """What times depend on: shapes, dtype, device, versions, threads, batch."""
    facts = machine_facts(backbone.device, backbone.dtype)
    config = json.loads(backbone.config.to_json_string(use_diff=True))
    named = ("name_or_path", "_name_or_path", "transformers_version", "dtype")
    shape = {key: value for key, value in config.items() if key not in named}
    return {
        "machine": {key: facts[key] for key in ("system", "versions", "threads", "cores", "device", "dtype")},
        "model": shape,
        "prepared": prepared,
        "route": backbone.route.name,
        "attention": str(getattr(backbone.config, "_attn_implementation", "")),
        "batch": 1,
        "cuda": torch.version.cuda,
    }
