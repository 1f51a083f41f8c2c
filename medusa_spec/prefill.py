"""Reads a prompt into the cache. Knows passes, no drafts and no choices."""

import torch

from medusa_spec.attention import TreePass
from medusa_spec.backbone import Backbone, TargetOutput
from medusa_spec.cache import SlabCache
from medusa_spec.tree import chain

CHAIN = 56
"""Tokens of a prompt that are read at once as a chain: what the linear kernel takes per reading of the weights."""


def prefill(
    backbone: Backbone, cache: SlabCache, ids: torch.Tensor, *, reserve: int, chunk: int | None = None
) -> TargetOutput:
    """Reads a prompt, or what a cache lacks of it; the cache is sealed then.

    Where tree passes run in one call (see `prepare`), a prompt is read by such passes, as chains: faster than plain
    ones of the same length, and with the same bits, whatever was in the cache before and however it is cut.

    Args:
        backbone: The target.
        cache: Holds what was read before; not sealed.
        ids: What is to be read [1, T].
        reserve: Tokens expected to follow.
        chunk: Most tokens read at once; None leaves it open.

    Returns:
        Logits and h of the last position.
    """
    if backbone.reads_chains:
        return _by_chains(backbone, cache, ids, reserve, chunk)
    out = _plainly(backbone, cache, ids, chunk)
    cache.seal(reserve)
    return out


def _plainly(backbone: Backbone, cache: SlabCache, ids: torch.Tensor, chunk: int | None) -> TargetOutput:
    for part in ids.split(chunk or ids.shape[1], dim=1):
        past = cache.get_seq_length()
        positions = torch.arange(past, past + part.shape[1], device=backbone.device).unsqueeze(0)
        out = backbone.forward(part, last_only=True, position_ids=positions, cache=cache)
    return out


def _by_chains(
    backbone: Backbone, cache: SlabCache, ids: torch.Tensor, reserve: int, chunk: int | None
) -> TargetOutput:
    out = None
    if cache.get_seq_length() == 0:
        out = _plainly(backbone, cache, ids[:, :1], None)  # its keys tell the shapes of the slabs
        ids = ids[:, 1:]
    cache.seal(reserve, unread=ids.shape[1])
    for part in ids.split(min(CHAIN, chunk or CHAIN), dim=1) if ids.shape[1] else ():
        nodes = part.shape[1]
        cache.make_room(nodes)
        shape = chain(nodes - 1)
        tree_pass = TreePass(shape=shape, cache=cache, device=backbone.device)
        out = backbone.verify(part, tree_pass, last_only=True)
        cache.keep(0, range(nodes))
    assert out is not None, "a prompt holds at least one token"
    return out
