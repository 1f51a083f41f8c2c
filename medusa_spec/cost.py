"""What a pass costs on this machine, and the tree size that pays. Knows times and expected gains, no heads."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from medusa_spec.attention import TreePass
from medusa_spec.backbone import Backbone
from medusa_spec.cache import SlabCache
from medusa_spec.errors import ConfigError
from medusa_spec.prepared.choice import most_likely
from medusa_spec.tree import TreeShape, chain, shape_of
from medusa_spec.tree import interpolate as between

SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 42, 56, 64)
"""Pass sizes N that are timed."""


def measure_pass_times(
    backbone: Backbone, sizes: Sequence[int] = SIZES, prefix: int = 256, repeats: int = 9, batch: int = 1
) -> dict[int, float]:
    """T(N): seconds of a verify pass of N nodes behind `prefix` tokens.

    The sizes are timed in turn, round after round, so that a machine that speeds up or slows down does it to all of
    them; the median of the rounds counts, and the first round does not.

    Args:
        backbone: The target, attached.
        sizes: Values of N.
        prefix: Prefix length.
        repeats: Rounds.
        batch: Rows of a pass, N nodes in each.

    Returns:
        Seconds by N.
    """
    cache = filled_cache(backbone, prefix, batch)
    return timed_in_turn({size: pass_timer(backbone, size, cache) for size in sizes}, repeats)


def timed_in_turn(
    timers: Mapping[Any, Callable[[], None]],
    rounds: int,
    *,
    warm_up: bool = True,
    of: Callable[[Sequence[float]], float] = statistics.median,
) -> dict[Any, float]:
    """Seconds of each function, by key.

    Args:
        timers: The functions; all run in turn, so that a machine that drifts does it to all of them.
        rounds: How often each runs.
        warm_up: Whether a first round does not count.
        of: What is made of the rounds.
    """
    seconds: dict[Any, list[float]] = {key: [] for key in timers}
    for lap in range(rounds + warm_up):
        for key, run in timers.items():
            began = perf_counter()
            run()
            if lap or not warm_up:
                seconds[key].append(perf_counter() - began)
    return {key: of(values) for key, values in seconds.items()}


def pass_timer(backbone: Backbone, size: int, cache: SlabCache) -> Callable[[], None]:
    """A function that makes one verify pass of `size` nodes, choice at every node included, and keeps none of them."""
    shape, ids = _bush(size), torch.zeros(1, len(cache.lengths) * size, dtype=torch.long, device=backbone.device)

    def run() -> None:
        cache.make_room(size)
        logits = backbone.verify(ids, TreePass(shape=shape, cache=cache, device=backbone.device)).logits
        most_likely(logits.flatten(0, 1))  # waits for the device as well

    return run


def filled_cache(backbone: Backbone, prefix: int, batch: int = 1) -> SlabCache:
    """A sealed cache as after `prefix` tokens, none of which was read: zeros take the time that others do.

    States of other forms than keys and values in slabs are those of as many tokens that were read.
    """
    cache = backbone.new_cache(batch)
    known = isinstance(cache, SlabCache)
    ids = torch.zeros(batch, 1 if known else prefix, dtype=torch.long, device=backbone.device)
    if ids.shape[1]:
        backbone.read(ids, cache, last_only=True)
    cache.seal(0)
    if not known:
        return cache
    kept = [prefix if window is None else min(prefix, window) for *_, window in cache.kinds()]
    states = [
        tuple(part.new_zeros(batch, part.shape[1], slots, part.shape[3]) for part in pair)
        for pair, slots in zip(cache.states(), kept, strict=True)
    ]
    cache.renew(states, prefix)
    return cache


def _bush(size: int) -> TreeShape:
    """A tree of typical form: four levels, bushy at the root; its form hardly matters, its size does."""
    if size <= 4:
        return chain(size - 1)
    parents = [-1, 0, 1, 2, 3]
    return shape_of(tuple((parents + [node // 3 for node in range(size)])[:size]))


def interpolate(times: Mapping[int, float], size: int) -> float:
    """T(N) from measured times by N, see `medusa_spec.tree.interpolate`."""
    if not times:
        raise ConfigError("times must hold at least one measured size, got none")
    return between(sorted(times.items()), size)


def best_size(expected: Sequence[float], times: Mapping[int, float], extra: float = 0.0) -> int:
    """The number of draft nodes that brings most tokens per second.

    Args:
        expected: Entry n: expected accepted tokens of the best tree of n draft nodes; entry 0 is 0.
        times: T(N) in seconds by N, the root included.
        extra: Seconds per drafted pass outside the target: drafting, and everything else of a step.

    Returns:
        n that maximises (1 + expected[n]) / (T(n + 1) + extra); plain decoding (n = 0) does not pay `extra`.
    """
    rates = [
        (1.0 + gain) / (interpolate(times, nodes + 1) + (extra if nodes else 0.0))
        for nodes, gain in enumerate(expected)
    ]
    return max(range(len(rates)), key=lambda nodes: (rates[nodes], -nodes))
