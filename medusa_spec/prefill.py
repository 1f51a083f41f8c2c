"""Reads a prompt into the cache. Knows passes, no drafts and no choices."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from medusa_spec.attention import TreePass
from medusa_spec.backbone import Backbone
from medusa_spec.cache import SlabCache
from medusa_spec.target_output import TargetOutput, joined
from medusa_spec.tree import chain

CHAIN = 56
"""Tokens of a prompt that are read at once as a chain: what the linear kernel takes per reading of the weights."""


def prefill(
    backbone: Backbone,
    cache: SlabCache,
    ids: torch.Tensor,
    *,
    reserve: int,
    chunk: int | None = None,
    reads: tuple[int, ...] | None = None,
    collect: tuple[str, ...] = (),
) -> TargetOutput:
    """Reads a prompt, or what a cache lacks of it; the cache is sealed then.

    Where tree passes run in one call (see `prepare`), a prompt is read by such passes, as chains: faster than plain
    ones of the same length, and with the same bits, whatever was in the cache before and however it is cut.

    Args:
        backbone: The target.
        cache: Holds what was read before; not sealed.
        ids: What is to be read [1, T].
        reserve: Tokens expected to follow.
        chunk: Most tokens read at once; None leaves it open. A prompt that changes with it is read at once even so:
            see `Route.reads_in_parts`.
        reads: Return h of all positions, and what entered these layers; None for h of the last one alone.
        collect: As `Backbone.forward`: hidden states of all that was read; attentions of the last piece, all
            of them being plain passes then.

    Returns:
        Logits of the last position; h of it, or with `reads` h and layers of all that was read.
    """
    wanted: dict[str, Any] = {"last_only": True, "collect": collect}
    if reads is not None:
        wanted |= {"all_states": True, "taps": reads}
    if backbone.reads_chains and "attentions" not in collect:
        return _joined(list(_by_chains(backbone, cache, ids, reserve, chunk, wanted)), whole=reads is not None)
    parts = list(_plainly(backbone, cache, ids, chunk, wanted))
    cache.seal(reserve)
    return _joined(parts, whole=reads is not None)


def _joined(parts: list[TargetOutput], *, whole: bool) -> TargetOutput:
    """One output of several passes: the last one's, or with the states of all."""
    if not whole and not parts[-1].hidden_states:
        return parts[-1]
    all_of_them = joined(parts)
    if not whole:
        return replace(parts[-1], hidden_states=all_of_them.hidden_states)
    return replace(all_of_them, logits=parts[-1].logits, attentions=parts[-1].attentions)


def _plainly(
    backbone: Backbone, cache: SlabCache, ids: torch.Tensor, chunk: int | None, wanted: dict[str, Any]
) -> Iterator[TargetOutput]:
    whole = chunk is None or not backbone.route.reads_in_parts
    for part in (ids,) if whole else ids.split(chunk, dim=1):
        yield backbone.read(part, cache, **wanted)


def _by_chains(
    backbone: Backbone, cache: SlabCache, ids: torch.Tensor, reserve: int, chunk: int | None, wanted: dict[str, Any]
) -> Iterator[TargetOutput]:
    if cache.get_seq_length() == 0:
        yield from _plainly(backbone, cache, ids[:, :1], None, wanted)  # its keys tell the shapes of the slabs
        ids = ids[:, 1:]
    cache.seal(reserve, unread=ids.shape[1])
    for part in ids.split(min(CHAIN, chunk or CHAIN), dim=1) if ids.shape[1] else ():
        nodes = part.shape[1]
        cache.make_room(nodes)
        tree_pass = TreePass(shape=chain(nodes - 1), cache=cache, device=backbone.device)
        yield backbone.verify(part, tree_pass, **wanted)
        cache.keep(0, range(nodes))
