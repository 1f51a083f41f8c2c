"""Heads and what followed before, as one tree. Knows values and prices, neither heads nor texts."""

from collections.abc import Sequence

import torch

from medusa_spec.drafters.asking import Drafting, alone
from medusa_spec.drafters.base import Drafter, DraftSession, ReadStates
from medusa_spec.drafters.suffix import SuffixDrafter
from medusa_spec.tree import Candidates, Prices, TokenTree
from medusa_spec.tree.candidates import Chosen

SLOWEST = 0.05
"""Least weight of the newest pass in running means: they follow what is decoded."""


class HybridDrafter(Drafter):
    """Adds what followed before to the heads' tree, and asks no heads where they could not pay.

    Heads and look-up propose into one pool, where what both propose is one node, and the nodes that pay best become the
    tree: so they share one budget by expected gain. Heads that give no chances draft alone, where the look-up expects
    less of its own tree than they gained so far. Where drafts of heads do not pay, the look-up goes on alone.

    Args:
        heads: Drafts with heads: `HeadsDrafter`, or any other whose drafts cost time.
        suffix: Looks up; None for a new one.
    """

    name = "hybrid"

    def __init__(self, heads: Drafter, suffix: SuffixDrafter | None = None) -> None:
        self.heads, self.suffix = heads, SuffixDrafter() if suffix is None else suffix
        self.reads = heads.reads
        self.record = HeadsRecord()

    @property
    def level_share(self) -> float:
        """See `Drafter`; look-up has no levels."""
        return self.heads.level_share

    @property
    def hit(self) -> float | None:
        """See `Drafter`; of the heads, since look-up goes on where their drafts do not pay."""
        return self.heads.hit

    def begin(self, prompt: Sequence[int]) -> DraftSession:
        """A session of both."""
        heads = self.heads.begin(prompt)
        measured = getattr(self.heads, "growth", None)  # heads that were calibrated on this machine know its prices
        prices = measured if isinstance(measured, Prices) else self.suffix.prices
        return _HybridSession(heads, self.suffix.begin(prompt), self.record, prices)


class HeadsRecord:
    """What drafts of the heads alone gained so far, as running means.

    Attributes:
        gain: Draft tokens accepted in a pass; 1 until there was one.
        levels: Levels drafted; 1 until there was one.
    """

    def __init__(self) -> None:
        self.gain = self.levels = 1.0
        self._passes = 1

    def add(self, gain: int, levels: int) -> None:
        """Counts a pass with a draft of the heads alone."""
        self._passes += 1
        weight = max(SLOWEST, 1 / self._passes)
        self.gain += weight * (gain - self.gain)
        self.levels += weight * (levels - self.levels)

    def gain_beside(self, candidates: Candidates) -> float:
        """Draft tokens that the heads would gain beside what others propose.

        Of depth d they are right with a chance of q^d, where q makes the sum over all depths what they gained so far;
        and others are right there with the sum of their nodes' values.
        """
        share = self.gain / (1 + self.gain)
        depths, covered = [0], [1.0]
        for parent, value in zip(candidates.parents[1:], candidates.values[1:], strict=True):
            depth = depths[parent] + 1
            depths.append(depth)
            covered += [0.0] * (depth + 1 - len(covered))
            covered[depth] += value
        missed = sum(share**depth * max(0.0, 1 - value) for depth, value in enumerate(covered))
        return missed + self.gain * share ** (len(covered) - 1)


class _HybridSession(DraftSession):
    def __init__(self, heads: DraftSession, suffix: DraftSession, record: HeadsRecord, prices: Prices) -> None:
        self.heads, self.suffix, self.record = heads, suffix, record
        self.prices = prices
        suffix.price(prices)
        self.alone: int | None = None  # levels of the last draft, if it was the heads' alone

    def price(self, prices: Prices) -> None:
        self.prices = prices
        self.heads.price(prices)
        self.suffix.price(prices)

    def read(self, ids: Sequence[int], states: ReadStates) -> None:
        self.heads.read(ids, states)

    def forget(self) -> None:
        self.heads.forget()

    def observe(self, tokens: Sequence[int]) -> None:
        if self.alone is not None:
            self.record.add(len(tokens) - 1, self.alone)
            self.alone = None
        self.heads.observe(tokens)
        self.suffix.observe(tokens)

    def propose(self, root: int, h: torch.Tensor | None, candidates: Candidates) -> bool:
        return alone(self.proposing(root, h, candidates))

    def proposing(self, root: int, h: torch.Tensor | None, candidates: Candidates) -> Drafting[bool]:
        self.alone, self.levels = None, 0
        self.suffix.propose(root, h, candidates)
        return self._sure(candidates) or (yield from self._heads_proposing(root, h, candidates))

    def _heads_proposing(self, root: int, h: torch.Tensor | None, candidates: Candidates) -> Drafting[bool]:
        proposed = yield from self.heads.proposing(root, h, candidates)
        self.levels = self.heads.levels
        return proposed

    def draft(self, root: int, h: torch.Tensor | None, limit: int | None) -> TokenTree:
        return alone(self.drafting(root, h, limit))

    def drafting(self, root: int, h: torch.Tensor | None, limit: int | None) -> Drafting[TokenTree]:
        self.alone, self.levels = None, 0
        if limit == 0:
            return TokenTree.root_only(root)
        candidates = Candidates()
        self.suffix.propose(root, h, candidates)
        found = candidates.best(self.prices, limit)
        if self._sure(candidates):
            return _tree(root, found)
        if (yield from self._heads_proposing(root, h, candidates)):
            tree = _tree(root, candidates.best(self.prices, limit))
        elif found.expected > self.record.gain:
            return _tree(root, found)
        else:
            tree = yield from self.heads.drafting(root, h, limit)
            self.levels = self.heads.levels
        if found.shape.size == 1:
            self.alone = tree.shape.max_depth
        return tree

    def draft_free(self, root: int, limit: int | None) -> TokenTree:
        self.alone, self.levels = None, 0
        candidates = Candidates()
        self.suffix.propose(root, None, candidates)
        return _tree(root, candidates.best(self.prices, limit))

    def _sure(self, candidates: Candidates) -> bool:
        """Whether there are guesses beside which the heads' could add less than the time in which they draft is worth.

        Whether they pay at all is not asked here: who does not try them would never learn it.
        """
        if len(candidates.values) == 1:
            return False
        price = self.record.levels * self.prices.level_seconds / self.prices.token_seconds
        return self.record.gain_beside(candidates) < price


def _tree(root: int, chosen: Chosen) -> TokenTree:
    return TokenTree(shape=chosen.shape, tokens=(root, *chosen.tokens))
