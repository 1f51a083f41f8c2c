"""The decoding loop: draft, lay out, verify, accept, keep. Knows no model internals and no arguments of generate."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessorList

from medusa_spec.acceptance import GREEDY, Accepted, Rule, walk
from medusa_spec.attention import TreePass
from medusa_spec.backbone import Backbone, TargetOutput
from medusa_spec.cache import SlabCache
from medusa_spec.controller import Controller, Plan
from medusa_spec.drafters import DraftSession, ReadStates, check_draft
from medusa_spec.extras import Extras
from medusa_spec.prefill import prefill
from medusa_spec.prepared.choice import most_likely
from medusa_spec.stats import DecodingStats
from medusa_spec.stopping import Sequence
from medusa_spec.tree import TokenTree, chain

if TYPE_CHECKING:
    from medusa_spec.static_decoding import StaticSteps


@dataclass(kw_only=True, eq=False)
class Request:
    """One row to decode.

    Attributes:
        sequence: Prompt, emitted tokens and stopping criteria.
        prefill_ids: What the target still has to read [1, T]: the prompt without padding and without what is cached.
        cache: Holds what was read before; empty for a fresh prompt.
        session: The drafter's state.
        reads: Layers of the target that the drafter reads beside h at every token; see `Drafter.reads`.
        rule: How tokens are chosen.
        processors: Applied to the logits before the choice; empty for none.
        prefill_chunk: Tokens of the prompt read at once; None reads all.
        draft_nodes: Most draft nodes per pass, 0 for plain decoding, None for the drafter's choice.
        controller: Decides pass by pass within that; None does as `draft_nodes` says.
        emit: Called with every emitted token, for streaming.
        keep_scores: Collect processed scores.
        keep_logits: Collect raw logits.
        extras: Collects what else is asked of the passes; None for nothing.
        steps: Decodes in steps of fixed shape where that serves; None for the ordinary loop alone.
        go_on: Called when the row is finished; true asks for another, empty pass (other ranks are still decoding).
    """

    sequence: Sequence
    prefill_ids: torch.Tensor
    cache: SlabCache
    session: DraftSession
    reads: tuple[int, ...] | None = None
    rule: Rule = GREEDY
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    prefill_chunk: int | None = None
    draft_nodes: int | None = None
    controller: Controller | None = None
    emit: Callable[[int], None] | None = None
    keep_scores: bool = False
    keep_logits: bool = False
    extras: Extras | None = None
    steps: "StaticSteps | None" = None
    go_on: Callable[[], bool] | None = None
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    done: bool = False

    def __post_init__(self) -> None:
        if self.keep_scores:
            self.sequence.scores = self.scores  # stopping criteria are shown them, as in plain decoding

    @property
    def batched_choice(self) -> bool:
        """Whether all nodes can be chosen from at once: nothing depends on the path."""
        return self.rule.batched and not (self.processors or self.keep_scores or self.keep_logits or self.extras)

    @property
    def collect(self) -> tuple[str, ...]:
        """What passes give beside logits and h."""
        return () if self.extras is None else self.extras.asked

    def plan(self) -> Plan:
        """What the next step does."""
        if self.controller is None:
            return Plan(limit=self.draft_nodes)
        plan = self.controller.plan(self.cache.lengths[0], self.sequence.new_tokens)
        if plan.prices is not None:
            self.session.price(plan.prices)
        return plan

    def learn(self, size: int, accepted: int, *, passed: float, step: float, draft: float = 0.0) -> None:
        """What became of that step: N, draft tokens accepted, seconds of the pass, of the whole, and of the draft."""
        if self.controller is not None:
            where = {"size": size, "prefix": self.cache.lengths[0], "accepted": accepted, "levels": self.session.levels}
            self.controller.observe(**where, passed=passed, step=step, draft=draft)

    @property
    def holds_whole_text(self) -> bool:
        """Whether the sequence is all that the target has read: no padding, nothing that only a user's cache holds."""
        return self.sequence.length == self.cache.get_seq_length() + 1


def decode(backbone: Backbone, request: Request) -> DecodingStats:
    """Decodes one row until it ends; its tokens are in `request.sequence`.

    Returns:
        Counters and times.
    """
    stats, clock = DecodingStats(requests=1, rule=str(request.rule)), Clock()
    out, accepted = read(backbone, request)
    stats.spans.append(1)
    stats.seconds["prefill"] += clock.lap()
    if request.steps is not None and not request.done:
        out, accepted = request.steps.decode(backbone, request, out, accepted, stats)
        clock.lap()
    while not request.done:
        cache = request.cache
        if request.holds_whole_text and backbone.reads_anew(request.sequence.ids, cache):
            out, accepted = read_anew(backbone, request)
            stats.record_pass(chain(0), accepted.path, gained=1)
            stats.seconds["verify"] += clock.lap()
            continue

        began, root, h = clock.last, accepted.tokens[-1], out.h[0, accepted.path[-1]]
        tree = draft(backbone, request, root, h)
        drafted = clock.lap()
        stats.seconds["draft"] += drafted

        ids, tree_pass = lay_out(tree, cache, backbone.device, request.extras)
        stats.seconds["lay_out"] += clock.lap()

        out = backbone.verify(ids, tree_pass, taps=request.reads or (), collect=request.collect)
        passed = clock.lap()
        stats.seconds["verify"] += passed

        before = request.sequence.new_tokens
        accepted = accept(tree, out, request)
        gained = request.sequence.new_tokens - before
        if request.extras is not None:
            request.extras.add_nodes(out, tree, cache, accepted.path[:gained])
        stats.seconds["accept"] += clock.lap()

        cache.keep(0, accepted.path[:gained])
        stats.seconds["keep"] += clock.lap()

        kept = list(accepted.path[:gained])
        show(request, [tree.tokens[node] for node in kept], out, kept)
        request.session.observe(accepted.tokens[:gained])
        stats.record_pass(tree.shape, accepted.path, gained)
        request.learn(tree.size, len(accepted.path) - 1, passed=passed, step=clock.last - began, draft=drafted)
        stats.seconds["rest"] += clock.lap()
    if request.controller is not None:
        stats.decisions += request.controller.decisions
    stats.new_tokens = request.sequence.new_tokens
    _wait_for_others(backbone, request)
    return stats


def read(backbone: Backbone, request: Request) -> tuple[TargetOutput, Accepted]:
    """Reads the text that the cache lacks and chooses the token after it."""
    longest = request.sequence.max_length
    reserve = 0 if longest is None else longest - request.sequence.length
    chunk, extras = request.prefill_chunk, request.extras
    wanted: dict[str, Any] = {"reads": request.reads, "collect": request.collect}
    wanted["chunk"] = chunk if extras is None else extras.pieces(chunk)
    out = prefill(backbone, request.cache, request.prefill_ids, reserve=reserve, **wanted)
    if extras is not None:
        extras.add_prompt(out, request.cache, request.prefill_ids.shape[1], chunk)
    show(request, request.prefill_ids[0].tolist(), out, slice(None))
    out = out.last()
    accepted = accept(TokenTree.root_only(-1), out, request)
    request.session.observe(accepted.tokens)
    return out, accepted


def show(request: Request, ids: list[int], out: TargetOutput, rows: "list[int] | slice") -> None:
    """Shows the drafter what the target computed at tokens that the cache holds now, if it asked for that."""
    if request.reads is not None and ids:
        layers = None if out.layers is None else out.layers[0, rows]
        request.session.read(ids, ReadStates(h=out.h[0, rows], layers=layers))


def read_anew(backbone: Backbone, request: Request) -> tuple[TargetOutput, Accepted]:
    """Reads the whole text again with an empty cache, in one piece: its last token changes what comes before."""
    request.cache, request.prefill_chunk = SlabCache(backbone.config), None
    request.prefill_ids = request.sequence.ids.to(backbone.device)
    request.session.forget()
    return read(backbone, request)


def draft(backbone: Backbone, request: Request, root: int, h: torch.Tensor) -> TokenTree:
    """The drafter's tree, cut where the model's positions end."""
    plan, deepest = request.plan(), backbone.deepest(request.cache.lengths[0])
    limit = plan.free if plan.limit == 0 else plan.limit
    if limit == 0 or deepest == 0:
        return TokenTree.root_only(root)
    if plan.limit == 0:
        tree = request.session.draft_free(root, limit)
    else:
        tree = request.session.draft(root, h, limit)
    check_draft(tree, root=root, limit=limit, ids_below=backbone.ids_below)
    return tree if deepest is None else tree.cut(deepest)


def lay_out(
    tree: TokenTree, cache: SlabCache, device: torch.device, extras: Extras | None = None
) -> tuple[torch.Tensor, TreePass]:
    """Node tokens as input ids [1, N], and the tree as attention sees it, with room for it in the cache."""
    cache.make_room(tree.size)
    kind = TreePass if extras is None else extras.pass_kind()
    return torch.tensor([tree.tokens], device=device), kind(shape=tree.shape, cache=cache, device=device)


def accept(tree: TokenTree, out: TargetOutput, request: Request) -> Accepted:
    """Walks the tree by the target's choices and emits them, cut at the first token that ends the row."""
    # Plain decoding chooses from float32 logits whatever the model's dtype; so do we.
    if request.batched_choice:
        accepted = walk(tree, most_likely(out.logits[0]).__getitem__)
        for token in accepted.tokens:
            if push(request, token):
                break
        return accepted

    def choose(node: int) -> int:
        raw = out.logits[:, node].to(copy=True, dtype=torch.float32, device=request.sequence.ids.device)
        scores = request.processors(request.sequence.ids, raw)  # type: ignore[arg-type]
        if request.keep_scores:
            request.scores.append(scores)
        if request.keep_logits:
            request.logits.append(raw)
        return request.rule.choose(scores)

    return walk(tree, choose, stop=lambda token: push(request, token))


def push(request: Request, token: int) -> bool:
    """Emits a token of the row; true if it is the last."""
    request.done = request.sequence.push(token)
    if request.emit is not None:
        request.emit(token)
    return request.done


def _wait_for_others(backbone: Backbone, request: Request) -> None:
    """Sharded over ranks, every forward is a collective: a finished rank must go on until all are."""
    while request.go_on is not None and request.go_on():
        ids, tree_pass = lay_out(TokenTree.root_only(0), request.cache, backbone.device)
        backbone.verify(ids, tree_pass)


class Clock:
    """Measures what lies between two laps."""

    def __init__(self) -> None:
        self.last = perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = perf_counter()
        elapsed, self.last = now - self.last, now
        return elapsed
