"""One whole step - draft, verify, accept, keep - as tensor operations of fixed shape. Knows no graphs, no requests."""

import torch

from medusa_spec.backbone import Backbone
from medusa_spec.drafters import FixedDraft
from medusa_spec.static_attention import StaticTreePass
from medusa_spec.static_cache import StaticCache
from medusa_spec.static_tree import StaticTree


class StaticStep:
    """Greedy decoding of one row, a step per call, with nothing read by the host.

    All that a step reads and writes lies in buffers of its own: the cache, `root` and `h`, and `emitted`, which holds
    the last accepted node and then the D + 1 tokens that its path gained, -1 behind them. So a step can be recorded
    and replayed.

    Args:
        backbone: The target.
        draft: Gives the nodes' tokens.
        cache: Its prefix; its length is the step's.
        h: A hidden state of the target [H], for dtype and device.
        backend: Of attention; see `StaticTreePass`.
    """

    def __init__(
        self,
        backbone: Backbone,
        draft: FixedDraft,
        cache: StaticCache,
        h: torch.Tensor,
        backend: str | None = None,
    ) -> None:
        self.backbone, self.draft, self.cache, self.backend = backbone, draft, cache, backend
        self.tree = StaticTree(shape=draft.shape, device=cache.device)
        self.root = torch.zeros(1, dtype=torch.long, device=cache.device)
        self.h = torch.zeros_like(h)
        self.emitted = torch.zeros(draft.shape.max_depth + 2, dtype=torch.long, device=cache.device)

    @torch.no_grad()
    def begin(self, root: torch.Tensor, h: torch.Tensor) -> None:
        """Puts the token that the target has chosen [1], and the hidden state [H] from which it did."""
        self.root.copy_(root)
        self.h.copy_(h)

    @torch.no_grad()
    def __call__(self) -> None:
        """Draft, verify, accept, keep."""
        tree, cache = self.tree, self.cache
        tokens = torch.cat([self.root, self.draft.guess(self.h)])

        cache.place(tree.shape.size)
        tree_pass = StaticTreePass(tree=tree, cache=cache, backend=self.backend)
        out = self.backbone.verify(tokens.unsqueeze(0), tree_pass)

        choices = out.logits[0].float().argmax(dim=-1)
        last = tree.accept(tokens, choices)
        path, depth = tree.paths.index_select(0, last)[0], tree.depths.index_select(0, last)

        cache.keep(path, depth + 1)
        self.root.copy_(choices.index_select(0, last))
        self.h.copy_(out.h[0].index_select(0, last)[0])
        gained = torch.where(tree.places <= depth, choices.index_select(0, path), -1)
        self.emitted.copy_(torch.cat([last, gained]))
