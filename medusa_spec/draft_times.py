"""What drafts of heads cost on this machine. Knows sessions and times, no gains."""

import statistics
import time
from collections.abc import Callable
from itertools import chain, repeat

import torch

from medusa_spec.backbone import Backbone
from medusa_spec.cost import filled_cache, pass_timer
from medusa_spec.drafters import DraftSession, HeadsDrafter, ReadStates
from medusa_spec.heads import DraftHeads
from medusa_spec.tree import TreeTemplate, chain_template

PREFIX = 256
"""Tokens before the pass whose time is measured: a usual chat."""

USUAL_GAIN = 3
"""Tokens that a step gains, which heads that attend read in the next."""

USUAL_SIZE = 8
"""Nodes of the target's passes between which drafts are timed."""


def draft_seconds(heads: DraftHeads, backbone: Backbone, tree: TreeTemplate, *, repeats: int = 15) -> float:
    """Median seconds of one draft of a tree, a pass of the target before each: it leaves no weights in the caches."""
    target_pass = pass_timer(backbone, USUAL_SIZE, filled_cache(backbone, PREFIX))
    lap = _laps(heads, backbone, tree, target_pass)
    return statistics.median(lap() for _ in range(repeats))


def draft_seconds_by_depth(heads: DraftHeads, backbone: Backbone, *, repeats: int = 15) -> dict[int, float]:
    """Median seconds of drafts of chains of 1 to K guesses, timed in turn as the machine drifts."""
    target_pass = pass_timer(backbone, USUAL_SIZE, filled_cache(backbone, PREFIX))
    depths = range(1, heads.config.num_heads + 1)
    laps = {depth: _laps(heads, backbone, chain_template(depth), target_pass) for depth in depths}
    seconds = [{depth: lap() for depth, lap in laps.items()} for _ in range(repeats)]
    return {depth: statistics.median(each[depth] for each in seconds) for depth in depths}


def _laps(
    heads: DraftHeads, backbone: Backbone, tree: TreeTemplate, target_pass: Callable[[], None]
) -> Callable[[], float]:
    """A function that makes the next draft of a text and gives its seconds; the first one reads a whole prompt."""
    drafter = HeadsDrafter(heads, tree, dtype=backbone.dtype, device=heads.projection.weight.device)
    session, h, counts = drafter.begin([]), made_up_h(drafter), chain([PREFIX], repeat(USUAL_GAIN))

    def lap() -> float:
        target_pass()
        show(session, drafter, h, next(counts))
        return _timed(session, h)

    return lap


def first_draft_seconds(drafter: HeadsDrafter, prefix: int, *, repeats: int = 3) -> float:
    """Median seconds of the first draft of a text behind `prefix` tokens, which heads that attend read in it."""
    seconds, h = [], made_up_h(drafter)
    for _ in range(repeats):
        session = drafter.begin([])
        show(session, drafter, h, prefix)
        seconds.append(_timed(session, h))
    return statistics.median(seconds)


def made_up_h(drafter: HeadsDrafter) -> torch.Tensor:
    """A hidden state [H] as the drafter takes them."""
    form = drafter.stacked
    return torch.ones(drafter.heads.config.hidden_size, dtype=form.dtype, device=form.device)


def show(session: DraftSession, drafter: HeadsDrafter, h: torch.Tensor, count: int) -> None:
    """Shows a session the same made-up state at as many tokens, if it reads any."""
    if drafter.reads is not None:
        layers = h.expand(count, len(drafter.reads), -1) if drafter.reads else None
        session.read([0] * count, ReadStates(h=h.expand(count, -1), layers=layers))


def _timed(session: DraftSession, h: torch.Tensor) -> float:
    began = time.perf_counter()
    session.draft(0, h, None)
    return time.perf_counter() - began
