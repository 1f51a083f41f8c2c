"""The loop over steps of fixed shape: when they serve, in what buffers, read one step late. Knows no HF internals."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

from medusa_spec.backbone import Backbone
from medusa_spec.decoding import Clock
from medusa_spec.drafters import FixedDraft
from medusa_spec.errors import ConfigError
from medusa_spec.graph import LateReader
from medusa_spec.request import Request
from medusa_spec.routes import AttentionRoute
from medusa_spec.static_buckets import Buckets
from medusa_spec.static_probe import static_probe
from medusa_spec.stats import DecodingStats
from medusa_spec.tree import chain

LONGEST_RESERVE = 2048
"""Most slots taken in advance: who allows a million tokens seldom gets them."""

MODES = ("auto", "graph", "eager", "off")


def plain_draft() -> FixedDraft:
    """No draft: plain decoding as a step."""
    return FixedDraft(shape=chain(0), guess=lambda h: torch.empty(0, dtype=torch.long, device=h.device), key="plain")


def reason_against(request: Request, backbone: Backbone, draft: FixedDraft | None) -> str | None:
    """Why a request cannot be decoded in steps of fixed shape, in words; None if it can."""
    if len(request.rows) != 1:
        return f"a batch of {len(request.rows)} rows; steps of fixed shape decode one"
    row = request.rows[0]
    if not row.batched_choice:
        return f"{row.rule.name} with processors or scores chooses token by token on the host"
    if draft is None:
        return "the drafter's trees have no fixed shape"
    if backbone.route.name != AttentionRoute.name:
        return f"the target's trees are checked on the route {backbone.route.name!r}"
    if backbone.rescales_positions:
        return "the target's rotary positions are rescaled by the host as the text grows"
    if backbone.vocab_size > backbone.ids_below:
        return "the target can choose ids that have no input embedding"
    if torch.is_autocast_enabled(backbone.device.type):
        return "autocast is on, which casts weights at every call"
    return backbone.spread


class StaticSteps:
    """Decodes requests in steps of fixed shape where that serves, on CUDA as recorded graphs.

    Args:
        mode: `"auto"`: as graphs on CUDA, not at all elsewhere; `"graph"`; `"eager"`: the same steps without graphs,
            on any device; `"off"`.

    Attributes:
        mode: May be changed between requests.
        reason: Why the last request was not decoded by graphs, in words; None if it was.
        backend: Of attention; None takes the best that is there.
        buckets: Steps that were made, and are kept for the next request.
    """

    def __init__(self, mode: str = "auto") -> None:
        self.mode = mode
        self.reason: str | None = "nothing was decoded yet"
        self.backend: str | None = None
        self._busy = Lock()
        self.clear()

    def clear(self) -> None:
        """Forgets all steps and frees their buffers."""
        self.buckets = Buckets()
        self._probed: dict[Hashable, str | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which record anew."""
        return {"mode": self.mode, "backend": self.backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["mode"])  # type: ignore[misc]
        self.backend = state["backend"]

    def decode(self, backbone: Backbone, request: Request, stats: DecodingStats) -> None:
        """Decodes a request whose prompt was read, as far as steps of fixed shape go; the ordinary loop may go on.

        Args:
            backbone: The target.
            request: Its cache is sealed; it holds what was decoded afterwards, too.
            stats: Is added to.
        """
        if self.mode not in MODES:
            raise ConfigError(f"mode must be one of {MODES}, got {self.mode!r}")
        self.reason = self._switched_off(backbone.device)
        if self.reason is not None:
            return
        nodes, row = request.plan().limit, request.rows[0]  # once for all steps: their shape is fixed
        draft = plain_draft() if nodes == 0 else row.session.fixed(row.h, nodes)
        self.reason = reason_against(request, backbone, draft)
        if self.reason is not None or draft is None:
            return
        if not self._busy.acquire(blocking=False):
            self.reason = "another thread decodes with these buffers"
            return
        try:
            with _current(backbone.device):
                self.reason = self._wrong(backbone)
                if self.reason is None:
                    _Run(self, backbone, request, draft, stats).decode()
        finally:
            self._busy.release()

    def _switched_off(self, device: torch.device) -> str | None:
        if self.mode == "off":
            return "switched off"
        if device.type != "cuda" and self.mode == "auto":
            return f"the target is on {device.type}; graphs are CUDA's"
        return None

    def _wrong(self, backbone: Backbone) -> str | None:
        """What speaks against passes of fixed shape of this model with this attention; asked once."""
        key = (type(backbone.model), backbone.dtype, backbone.device, self.backend)
        if key not in self._probed:
            try:
                self._probed[key] = static_probe(backbone, self.backend)
            except Exception as error:  # a model or a library that they do not suit: the ordinary loop serves it
                self._probed[key] = f"a pass of fixed shape failed: {type(error).__name__}: {error}"
        return self._probed[key]


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Makes a CUDA device the current one, and leaves nothing under way on it: another stream may come next."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield
        torch.cuda.current_stream(device).synchronize()


class _Run:
    """One request in steps of fixed shape."""

    def __init__(
        self, steps: StaticSteps, backbone: Backbone, request: Request, draft: FixedDraft, stats: DecodingStats
    ) -> None:
        self.steps, self.backbone, self.request, self.draft, self.stats = steps, backbone, request, draft, stats
        self.row = request.rows[0]
        self.known = request.cache.lengths[0]  # tokens of the prefix, as far as they were read
        self.most, self.nodes = draft.shape.max_depth + 1, draft.shape.size
        self.clock = Clock()

    def decode(self) -> None:
        """See `StaticSteps.decode`."""
        cache, row = self.request.cache, self.row
        if not self._enter(row.h):
            return
        step = self.bucket.step
        step.cache.load(cache.states(), self.known)
        step.begin(torch.tensor([row.root], device="cpu"), row.h)
        cache.release()
        self.stats.seconds["lay_out"] += self.clock.lap()
        try:
            self._loop()
        finally:
            step = self.bucket.step
            step.cache.cut(self.known)  # a step that was under way when the end was read is forgotten
            cache.renew(step.cache.states(), self.known)
        row.root, row.h = int(row.sequence.ids[0, -1]), step.h.clone()

    def _loop(self) -> None:
        reader = LateReader(self.bucket.step.emitted)
        while not self.row.done:
            if reader.waiting < 2 and self._may_go_on(reader.waiting):
                self.bucket.run()
                reader.put(self.bucket.step.emitted)
            elif reader.waiting:
                self._emit(reader.take())
            elif not self._grow():
                break

    def _may_go_on(self, under_way: int) -> bool:
        """Whether a step may follow on as many as were not read yet, whatever they gain."""
        sequence = self.row.sequence
        if sequence.max_length is not None and sequence.length + under_way >= sequence.max_length:
            return False  # each gains a token at least
        longest = self.known + under_way * self.most
        return longest + self.nodes <= self.bucket.step.cache.capacity and self._positions_reach(longest)

    def _positions_reach(self, length: int) -> bool:
        deepest = self.backbone.deepest(length)
        return deepest is None or deepest >= self.most - 1

    def _emit(self, values: list[int]) -> None:
        shape, sequence = self.draft.shape, self.row.sequence
        path = shape.path_to(values[0])
        tokens = values[1 : 1 + len(path)]
        before = sequence.new_tokens
        for token in tokens:
            if self.row.push(token):
                break
        gained = sequence.new_tokens - before
        self.known += gained
        self.row.session.observe(tokens[:gained])
        self.stats.record_pass(shape, path, gained)
        seconds = self.clock.lap()
        self.request.learn((0,), nodes=shape.size, accepted=len(path) - 1, passed=seconds, step=seconds)
        self.stats.seconds["verify"] += seconds

    def _enter(self, h: torch.Tensor) -> bool:
        """Takes a bucket with room for what may follow; false if none can be had."""
        sequence = self.row.sequence
        if not self._positions_reach(self.known):
            self.steps.reason = "the target's positions end before the tree does"
            return False
        following = LONGEST_RESERVE if sequence.max_length is None else sequence.max_length - sequence.length
        slots = self.known + min(following, LONGEST_RESERVE) + 2 * self.most + self.nodes
        try:
            self.bucket = self.steps.buckets.take(
                self.backbone,
                self.draft,
                self.request.cache,
                h,
                slots,
                eager=self.steps.mode == "eager",
                backend=self.steps.backend,
            )
        except Exception as error:  # out of memory, or a model that no static cache suits: the ordinary loop serves it
            self.steps.reason = f"a step of fixed shape failed: {type(error).__name__}: {error}"
            return False
        self.steps.reason = self.bucket.reason
        return True

    def _grow(self) -> bool:
        """Moves into a larger bucket; false if the ordinary loop must go on."""
        old = self.bucket.step
        old.cache.cut(self.known)
        if not self._enter(old.h):
            return False
        new = self.bucket.step
        new.cache.load(old.cache.states(), self.known)
        new.begin(old.root, old.h)
        self.stats.seconds["lay_out"] += self.clock.lap()
        return True
