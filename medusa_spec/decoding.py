"""The decoding loop: draft, lay out, verify, accept, keep. Knows no model internals and no arguments of generate."""

from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from medusa_spec.acceptance import Accepted, walk
from medusa_spec.attention import TreePass
from medusa_spec.backbone import Backbone, TargetOutput
from medusa_spec.cache import SlabCache
from medusa_spec.drafters import ReadStates, check_draft
from medusa_spec.drafters.asking import together
from medusa_spec.extras import Extras
from medusa_spec.prefill import prefill
from medusa_spec.prepared.choice import most_likely
from medusa_spec.request import Request, Row
from medusa_spec.stats import DecodingStats
from medusa_spec.tree import TokenTree, chain


def decode(backbone: Backbone, request: Request) -> DecodingStats:
    """Decodes rows side by side until all have ended; their tokens are in their sequences.

    Returns:
        Counters and times.
    """
    stats, clock = DecodingStats(requests=len(request.rows), rule=str(request.rows[0].rule)), Clock()
    read(backbone, request)
    stats.spans += [1] * len(request.rows)
    stats.seconds["prefill"] += clock.lap()
    if request.steps is not None and not request.done:
        request.steps.decode(backbone, request, stats)
        clock.lap()
    while not request.done:
        if request.holds_whole_text and backbone.reads_anew(request.rows[0].sequence.ids, request.cache):
            read_anew(backbone, request)
            stats.record_pass(chain(0), (0,), gained=1)
            stats.seconds["verify"] += clock.lap()
            continue

        began = clock.last
        trees = draft(backbone, request)
        drafted = clock.lap()
        stats.seconds["draft"] += drafted

        ids, tree_pass = lay_out(trees, request.cache, backbone.device, request.extras)
        stats.seconds["lay_out"] += clock.lap()

        out = backbone.verify(ids, tree_pass, taps=request.reads or (), collect=request.collect)
        passed = clock.lap()
        stats.seconds["verify"] += passed

        outs = {place: out.part(part) for place, part in tree_pass.parts.items()}
        accepted = {place: accept(tree, outs[place], request.rows[place]) for place, tree in trees.items()}
        if request.extras is not None:
            request.extras.add_nodes(out, trees[0], request.cache, accepted[0].path[: accepted[0].gained])
        stats.seconds["accept"] += clock.lap()

        for place, walked in accepted.items():
            request.cache.keep(place, walked.path[: walked.gained])
        stats.seconds["keep"] += clock.lap()

        for place, walked in accepted.items():
            tell(request, place, trees[place], outs[place], walked)
            stats.record_pass(trees[place].shape, walked.path, walked.gained)
        lengths = [len(walked.path) - 1 for walked in accepted.values()]
        seconds = {"passed": passed, "step": clock.last - began, "draft": drafted}
        request.learn(trees, nodes=ids.shape[1], accepted=sum(lengths), **seconds)
        stats.seconds["rest"] += clock.lap()
    stats.decisions += request.decisions
    stats.new_tokens = sum(row.sequence.new_tokens for row in request.rows)
    return stats


def read(backbone: Backbone, request: Request) -> None:
    """Reads the texts that the cache lacks, row by row, and chooses the token after each.

    Rows with the same prompt are read once. The cache of several rows is then a copy of those that were read.
    """
    caches, texts = list[SlabCache](), dict[tuple[int, ...], tuple[SlabCache, TargetOutput]]()
    for row in request.rows:
        ids = tuple(row.unread[0].tolist())
        if ids not in texts:
            own = request.cache if not texts else backbone.new_cache()
            texts[ids] = own, _prefilled(backbone, request, row, own)
        own, out = texts[ids]
        caches.append(own)
        show(request, row, list(ids), out, slice(None))
        accepted = accept(TokenTree.root_only(-1), out.last(), row)
        row.session.observe(accepted.tokens)
    if len(request.rows) > 1:
        reserve = max(_rest(row) for row in request.rows)
        request.cache = type(caches[0]).joined(caches, backbone.config, reserve=reserve)


def _prefilled(backbone: Backbone, request: Request, row: Row, cache: SlabCache) -> TargetOutput:
    reserve = _rest(row) if len(request.rows) == 1 else 0
    chunk, extras = request.prefill_chunk, request.extras
    wanted: dict[str, Any] = {"reads": request.reads, "collect": request.collect}
    wanted["chunk"] = chunk if extras is None else extras.pieces(chunk)
    out = prefill(backbone, cache, row.unread, reserve=reserve, **wanted)
    if extras is not None:
        extras.add_prompt(out, cache, row.unread.shape[1], chunk)
    return out


def _rest(row: Row) -> int:
    longest = row.sequence.max_length
    return 0 if longest is None else longest - row.sequence.length


def read_anew(backbone: Backbone, request: Request) -> None:
    """Reads the only row's text again with an empty cache, in one piece: its last token changes what comes before."""
    request.cache, request.prefill_chunk = backbone.new_cache(), None
    row = request.rows[0]
    row.unread = row.sequence.ids.to(backbone.device)
    row.session.forget()
    read(backbone, request)


def draft(backbone: Backbone, request: Request) -> dict[int, TokenTree]:
    """The drafters' trees by row, cut where the model's positions end."""
    plan, running = request.plan(), request.running
    limit = plan.free if plan.limit == 0 else plan.limit
    deepest = {place: backbone.deepest(request.cache.lengths[place]) for place in running}
    drafting = {place: row for place, row in running.items() if limit != 0 and deepest[place] != 0}
    if plan.limit == 0:
        made = {place: row.session.draft_free(row.root, limit) for place, row in drafting.items()}
    else:
        made = together({place: row.session.drafting(row.root, row.h, limit) for place, row in drafting.items()})
    for place, tree in made.items():
        check_draft(tree, root=running[place].root, limit=limit, ids_below=backbone.ids_below)
        bound = deepest[place]
        made[place] = tree if bound is None else tree.cut(bound)
    return {place: made.get(place) or TokenTree.root_only(row.root) for place, row in running.items()}


def lay_out(
    trees: Mapping[int, TokenTree], cache: SlabCache, device: torch.device, extras: Extras | None = None
) -> tuple[torch.Tensor, TreePass]:
    """Node tokens of all rows as input ids [1, M], and the trees as attention sees them, with room in the cache."""
    shapes = tuple(trees[place].shape if place in trees else None for place in range(len(cache.lengths)))
    cache.make_room([0 if shape is None else shape.size for shape in shapes])
    ids = [token for place in sorted(trees) for token in trees[place].tokens]
    kind = TreePass if extras is None else extras.pass_kind()
    return torch.tensor([ids], device=device), kind(shape=shapes, cache=cache, device=device)


def accept(tree: TokenTree, out: TargetOutput, row: Row) -> Accepted:
    """Walks a tree by the target's choices and emits them, cut at the first token that ends the row."""
    accepted = _walked(tree, out, row)
    row.root, row.h = accepted.tokens[-1], out.h[0, accepted.path[-1]]
    return accepted


def _walked(tree: TokenTree, out: TargetOutput, row: Row) -> Accepted:
    # Plain decoding chooses from float32 logits whatever the model's dtype; so do we.
    if row.batched_choice:
        accepted = walk(tree, most_likely(out.logits[0]).__getitem__)
        for gained, token in enumerate(accepted.tokens, start=1):
            if row.push(token):
                return replace(accepted, gained=gained)
        return accepted

    def choose(node: int) -> int:
        raw = out.logits[:, node].to(copy=True, dtype=torch.float32, device=row.sequence.ids.device)
        scores = row.processors(row.sequence.ids, raw)  # type: ignore[arg-type]
        if row.keep_scores:
            row.scores.append(scores)
        if row.keep_logits:
            row.logits.append(raw)
        return row.rule.choose(scores)

    return walk(tree, choose, stop=row.push)


def tell(request: Request, place: int, tree: TokenTree, out: TargetOutput, accepted: Accepted) -> None:
    """Tells a row's drafter what became of its tree."""
    row, kept = request.rows[place], list(accepted.path[: accepted.gained])
    show(request, row, [tree.tokens[node] for node in kept], out, kept)
    row.session.observe(accepted.tokens[: accepted.gained])


def show(request: Request, row: Row, ids: list[int], out: TargetOutput, positions: "list[int] | slice") -> None:
    """Shows the drafter what the target computed at tokens that the cache holds now, if it asked for that."""
    if request.reads is not None and ids:
        layers = None if out.layers is None else out.layers[0, positions]
        row.session.read(ids, ReadStates(h=out.h[0, positions], layers=layers))


class Clock:
    """Measures what lies between two laps."""

    def __init__(self) -> None:
        self.last = perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = perf_counter()
        elapsed, self.last = now - self.last, now
        return elapsed
