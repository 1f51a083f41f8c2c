"""Steps of fixed shape by tree and capacity, recorded where that can be, kept for later. Knows no requests."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from medusa_spec.backbone import Backbone
from medusa_spec.cache import SlabCache
from medusa_spec.drafters import FixedDraft
from medusa_spec.graph import GraphError, Recorder
from medusa_spec.static_cache import StaticCache
from medusa_spec.static_step import StaticStep

SMALLEST_CAPACITY = 512
"""Slots of the smallest bucket; each following one has twice as many."""

MOST_BUCKETS = 4
"""Buckets kept; the one that was used longest ago goes first."""


def capacity_for(slots: int) -> int:
    """The capacity of the bucket that serves for so many slots."""
    capacity = SMALLEST_CAPACITY
    while capacity < slots:
        capacity *= 2
    return capacity


@dataclass(kw_only=True, eq=False)
class Bucket:
    """A step for one tree and one capacity, and how it is run.

    Attributes:
        step: Its buffers.
        run: Makes a step.
        reason: Why that is not by a graph; None if it is.
        placed: Where the target's weights lay when it was recorded.
    """

    step: StaticStep
    run: Callable[[], None]
    reason: str | None
    placed: Hashable


class Buckets:
    """Steps that were made. Those of one capacity share their keys and values."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[Hashable, Bucket] = OrderedDict()
        self._caches: WeakValueDictionary[int, StaticCache] = WeakValueDictionary()
        self._recorder = Recorder()

    def __len__(self) -> int:
        return len(self._buckets)

    def kept(self) -> list[Bucket]:
        """Those that are kept, in the order in which they were used."""
        return list(self._buckets.values())

    def take(
        self,
        backbone: Backbone,
        draft: FixedDraft,
        like: SlabCache,
        h: torch.Tensor,
        slots: int,
        *,
        eager: bool = False,
        backend: str | None = None,
    ) -> Bucket:
        """A step for this draft with at least so many slots, recorded if that can be; what it raises is raised.

        Args:
            backbone: The target.
            draft: The nodes' tokens.
            like: A sealed cache of the target.
            h: A hidden state of the target [H].
            slots: Prefix and nodes.
            eager: Do not record it.
            backend: Of attention; see `StaticTreePass`.
        """
        capacity = capacity_for(slots)
        key, placed = (draft.key, capacity, eager, backend), backbone.placed
        found = self._buckets.pop(key, None)
        if found is None or found.placed != placed or not found.step.cache.fits(like):
            found = None  # frees its buffers before others are made
            cache = self._caches.get(capacity)
            if cache is None or not cache.fits(like):
                cache = self._caches[capacity] = StaticCache(like, capacity)
            step = StaticStep(backbone, draft, cache, h, backend)
            run, reason = self._recorded(step, eager)
            found = Bucket(step=step, run=run, reason=reason, placed=placed)
        self._buckets[key] = found
        while len(self._buckets) > MOST_BUCKETS:
            self._buckets.popitem(last=False)
        return found

    def _recorded(self, step: StaticStep, eager: bool) -> tuple[Callable[[], None], str | None]:
        if eager:
            return step, "eager steps were asked for"
        # Behind a prefix of one token there is room for the nodes, whatever the last request left behind.
        step.cache.cut(1)
        try:
            return self._recorder.record(step, lambda: step.cache.cut(1)), None
        except GraphError as error:
            return step, f"it cannot be recorded: {error}"
