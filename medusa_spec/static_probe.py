"""Does a tree pass of fixed shape equal the ordinary one on this model? Asked before steps of fixed shape are used."""

import torch

from medusa_spec.backbone import Backbone
from medusa_spec.cache import SlabCache
from medusa_spec.probe import EXACT, FAR_BELOW, PROBE_SHAPE, arbitrary_prompt, tree_logits
from medusa_spec.static_attention import StaticTreePass
from medusa_spec.static_cache import StaticCache
from medusa_spec.static_tree import StaticTree
from medusa_spec.tree import chain

CAPACITY = 64


@torch.no_grad()
def static_probe(backbone: Backbone, backend: str | None = None) -> str | None:
    """Compares logits at the nodes of `PROBE_SHAPE`: of fixed shape, in the ordinary way, and with a wrong mask.

    Args:
        backbone: A model that passed the probe of ordinary tree passes.
        backend: Of attention; see `StaticTreePass`.

    Returns:
        What is wrong, in words; None if all is well.
    """
    prompt, tokens = arbitrary_prompt(backbone, 12), arbitrary_prompt(backbone, PROBE_SHAPE.size + 3)[:, 3:]
    right = tree_logits(backbone, prompt, tokens, PROBE_SHAPE)
    wrong = tree_logits(backbone, prompt, tokens, chain(PROBE_SHAPE.size - 1), positions=PROBE_SHAPE)
    found = (static_logits(backbone, prompt, tokens, backend) - right).abs()
    allowed = FAR_BELOW * float((wrong - right).abs()[2:].mean())  # root and first node are the same under both masks
    if backbone.dtype == torch.float64:
        allowed = min(allowed, EXACT)
    if float(found.mean()) < allowed:
        return None
    return f"passes of fixed shape differ from ordinary ones by {float(found.mean()):.3g} (allowed {allowed:.3g})"


def static_logits(
    backbone: Backbone, prompt: torch.Tensor, tokens: torch.Tensor, backend: str | None = None
) -> torch.Tensor:
    """Logits [N, V] in float64 at the nodes of `PROBE_SHAPE`, tokens [1, N], behind a prompt [1, T]."""
    slabs = SlabCache(backbone.config)
    backbone.forward(prompt, last_only=True, cache=slabs)
    slabs.seal(0)
    cache = StaticCache(slabs, CAPACITY)
    cache.load(slabs.states(), prompt.shape[1])
    cache.place(PROBE_SHAPE.size)
    tree = StaticTree(shape=PROBE_SHAPE, device=cache.device)
    return backbone.verify(tokens, StaticTreePass(tree=tree, cache=cache, backend=backend)).logits[0].double()
