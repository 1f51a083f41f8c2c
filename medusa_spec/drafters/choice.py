"""What becomes of a draft's guesses: a static template filled, or a tree that grows. Knows logits, no heads."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from medusa_spec.drafters.levels import Plan
from medusa_spec.prepared.choice import likeliest
from medusa_spec.tree import Candidates, Growing, Growth, TokenTree, TreeTemplate, Trust, open_product


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

    def learn(self, tokens: Sequence[int]) -> None:  # noqa: B027 (templates believe nothing)
        """Is told the tokens that the target then emitted: those that were accepted, and one of its own."""


class TemplateChoice(Choice):
    """Fills a static template."""

    def __init__(self, template: TreeTemplate, plan: Plan, draft_ids: torch.Tensor | None) -> None:
        self.template, self.plan, self.draft_ids = template, plan, draft_ids
        self.found: list[torch.Tensor] = []

    def take(self, depth: int, logits: torch.Tensor) -> Chosen | None:
        """See `Choice`."""
        self.levels += 1
        level = self.plan.levels[depth]
        # Top-k in bfloat16 is slow on CPUs.
        tokens = logits.float().topk(level.width, dim=-1).indices.flatten()[level.slots]
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


def calibrated(
    growth: Growth, logits: torch.Tensor, draft_ids: Sequence[int] | None
) -> tuple[list[list[int]], list[list[float]]]:
    """The best guesses of every row, the likeliest first, and what chance each has, calibrated.

    Args:
        growth: Says how many, and how far to trust the logits.
        logits: [M, draft vocabulary].
        draft_ids: Target ids of the draft vocabulary; None if it is all of them.

    Returns:
        Target ids [M][W], and chances [M][W].
    """
    places, shares = likeliest(logits, growth.width, growth.temperature)
    ids, chances = places.tolist(), shares.tolist()
    if draft_ids is not None:
        ids = [[draft_ids[place] for place in row] for row in ids]
    return ids, [[growth.coverage * share for share in row] for row in chances]


class GrowthChoice(Choice):
    """Lets a tree grow as far as it pays.

    Args:
        growth: The rules.
        deepest: Most levels.
        limit: Most draft nodes; None leaves it to the rules.
        draft_ids: Target ids of the draft vocabulary; None if it is all of them.
        candidates: What others have proposed already.
        trust: How far chances hold on this text; learns more of it.
    """

    def __init__(
        self,
        growth: Growth,
        deepest: int,
        limit: int | None,
        draft_ids: Sequence[int] | None,
        candidates: Candidates | None = None,
        trust: Trust | None = None,
    ) -> None:
        self.growth, self.deepest, self.draft_ids = growth, deepest, draft_ids
        self.trust = Trust() if trust is None else trust
        self.growing = Growing(growth, limit, candidates, hit=self.trust.first(growth.hit))
        self.nodes = [0]
        self.said: dict[int, tuple[int, float]] = {}  # below each node: the first guess and its chance

    def take(self, depth: int, logits: torch.Tensor) -> Chosen | None:
        """See `Choice`."""
        self.levels += 1
        ids, chances = calibrated(self.growth, logits, self.draft_ids)
        row_of = {node: row for row, node in enumerate(self.nodes)}
        for node, row in row_of.items():
            self.said[node] = ids[row][0], chances[row][0]
        parents = [node for node, row in row_of.items() for _ in ids[row]]
        believed = [chance for row in chances for chance in self.trust.all(row)]
        wanted = self.growing.add(parents, [token for row in ids for token in row], believed)
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

    def learn(self, tokens: Sequence[int]) -> None:
        """See `Choice`; of the guesses on the path that came true."""
        node: int | None = 0
        for token in tokens:
            if node not in self.said:
                break
            guess, chance = self.said[node]
            self.trust.learn(chance, token == guess)
            node = self.growing.candidates.child(node, token)


class ProductChoice:
    """A tree of the guesses of heads that do not wait for each other, made of one step's chances as far as it pays.

    Args:
        growth: The rules.
        limit: Most draft nodes; None leaves it to the rules.
        draft_ids: Target ids of the draft vocabulary; None if it is all of them.
        candidates: What others have proposed already.
        trust: How far chances hold on this text; learns more of it.
    """

    def __init__(
        self,
        growth: Growth,
        limit: int | None,
        draft_ids: Sequence[int] | None,
        candidates: Candidates | None = None,
        trust: Trust | None = None,
    ) -> None:
        self.growth, self.draft_ids = growth, draft_ids
        self.limit = growth.largest if limit is None else min(limit, growth.largest)
        self.candidates = Candidates() if candidates is None else candidates
        self.trust = Trust() if trust is None else trust
        self.said: list[tuple[int, float]] = []  # each head's first guess and its chance

    def take(self, logits: torch.Tensor) -> None:
        """Takes the guesses of all heads, logits [K, draft vocabulary]."""
        ids, chances = calibrated(self.growth, logits, self.draft_ids)
        self.said = [(tokens[0], row[0]) for tokens, row in zip(ids, chances, strict=True)]
        believed = [self.trust.all(row) for row in chances]
        open_product(self.candidates, ids, believed, price=self.growth.node_price, limit=self.limit)

    def tree(self, root: int) -> TokenTree:
        """The tree that came of it."""
        chosen = self.candidates.best(self.growth, self.limit)
        return TokenTree(shape=chosen.shape, tokens=(root, *chosen.tokens))

    def learn(self, tokens: Sequence[int]) -> None:
        """Is told the tokens that the target then emitted: those that were accepted, and one of its own."""
        for token, (guess, chance) in zip(tokens, self.said, strict=False):
            self.trust.learn(chance, token == guess)
