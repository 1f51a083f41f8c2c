"""What becomes of a draft's guesses: a static template filled, or a tree that grows. Knows logits, no heads."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from medusa_spec.drafters.levels import Plan
from medusa_spec.tree import Candidates, Growing, Growth, TokenTree, TreeTemplate, open_product


@dataclass(frozen=True, kw_only=True, eq=False)
class Chosen:
    """Which guesses get children of their own.

    Attributes:
        rows: For each its parent's row among those guessed below.
        tokens: Int64 [M], their target ids.
    """

    rows: Sequence[int]
    tokens: torch.Tensor


class Choice(ABC):
    """What becomes of the guesses of a draft, level by level.

    Attributes:
        levels: Levels taken so far.
    """

    levels: int = 0

    @abstractmethod
    def take(self, depth: int, logits: torch.Tensor) -> Chosen | None:
        """Takes the guesses below the M nodes of a depth (the root's is 0), logits [M, draft vocabulary].

        Returns:
            The nodes of the next depth to guess below, or None if the draft is done.
        """

    @abstractmethod
    def tree(self, root: int) -> TokenTree:
        """The tree that came of it."""


class TemplateChoice(Choice):
    """Fills a static template."""

    def __init__(self, template: TreeTemplate, plan: Plan, draft_ids: torch.Tensor | None) -> None:
        self.template, self.plan, self.draft_ids = template, plan, draft_ids
        self.found: list[torch.Tensor] = []

    def take(self, depth: int, logits: torch.Tensor) -> Chosen | None:
        """See `Choice`."""
        self.levels += 1
        level = self.plan.levels[depth]
        tokens = logits.topk(level.width, dim=-1).indices.flatten()[level.slots]
        if self.draft_ids is not None:
            tokens = self.draft_ids[tokens]
        self.found.append(tokens)
        if depth + 1 == len(self.plan.levels):
            return None
        return Chosen(rows=level.parents.tolist(), tokens=tokens[level.kept])

    def tree(self, root: int) -> TokenTree:
        """See `Choice`."""
        tokens = torch.cat(self.found)[self.plan.order].tolist()
        return TokenTree(shape=self.template.shape, tokens=(root, *tokens))


def likeliest(
    growth: Growth, logits: torch.Tensor, draft_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best guesses of every row, the likeliest first, and what chance each has, calibrated.

    Args:
        growth: Says how many, and how far to trust the logits.
        logits: [M, draft vocabulary].
        draft_ids: Target ids of the draft vocabulary; None if it is all of them.

    Returns:
        Target ids, int64 [M, W], and chances [M, W].
    """
    if growth.temperature != 1.0:
        logits = logits / growth.temperature
    best = logits.topk(min(growth.width, logits.shape[1]), dim=-1)
    chances = (best.values - logits.logsumexp(-1, keepdim=True)).exp() * growth.coverage
    return best.indices if draft_ids is None else draft_ids[best.indices], chances


class GrowthChoice(Choice):
    """Lets a tree grow as far as it pays."""

    def __init__(
        self,
        growth: Growth,
        deepest: int,
        limit: int | None,
        draft_ids: torch.Tensor | None,
        candidates: Candidates | None = None,
    ) -> None:
        self.growth, self.deepest, self.draft_ids = growth, deepest, draft_ids
        self.growing = Growing(growth, limit, candidates)
        self.nodes = [0]

    def take(self, depth: int, logits: torch.Tensor) -> Chosen | None:
        """See `Choice`."""
        self.levels += 1
        ids, chances = likeliest(self.growth, logits, self.draft_ids)
        parents = [node for node in self.nodes for _ in range(ids.shape[1])]
        row_of = {node: row for row, node in enumerate(self.nodes)}
        wanted = self.growing.add(parents, ids.flatten().tolist(), chances.flatten().tolist())
        if not wanted or depth + 1 == self.deepest:
            return None
        self.nodes = wanted
        candidates = self.growing.candidates
        rows = [row_of[candidates.parents[node]] for node in wanted]
        tokens = torch.tensor([candidates.tokens[node] for node in wanted], device=logits.device)
        return Chosen(rows=rows, tokens=tokens)

    def tree(self, root: int) -> TokenTree:
        """See `Choice`."""
        chosen = self.growing.finish()
        return TokenTree(shape=chosen.shape, tokens=(root, *chosen.tokens))


class ProductChoice:
    """A tree of the guesses of heads that do not wait for each other, made of one step's chances as far as it pays."""

    def __init__(
        self,
        growth: Growth,
        limit: int | None,
        draft_ids: torch.Tensor | None,
        candidates: Candidates | None = None,
    ) -> None:
        self.growth, self.draft_ids = growth, draft_ids
        self.limit = growth.largest if limit is None else min(limit, growth.largest)
        self.candidates = Candidates() if candidates is None else candidates

    def take(self, logits: torch.Tensor) -> None:
        """Takes the guesses of all heads, logits [K, draft vocabulary]."""
        ids, chances = likeliest(self.growth, logits, self.draft_ids)
        price = self.growth.node_price
        open_product(self.candidates, ids.tolist(), chances.tolist(), price=price, limit=self.limit)

    def tree(self, root: int) -> TokenTree:
        """The tree that came of it."""
        chosen = self.candidates.best(self.growth, self.limit)
        return TokenTree(shape=chosen.shape, tokens=(root, *chosen.tokens))
