"""N-gram lookup: what followed the last time these tokens stood here. Needs no training; knows ids only."""

from collections.abc import Sequence

import torch

from medusa_spec.drafters.base import Drafter, DraftSession
from medusa_spec.errors import ConfigError
from medusa_spec.tree import TokenTree, merge_chains

Gram = tuple[int, ...]


class NgramDrafter(Drafter):
    """Looks the last tokens up in prompt and output and proposes what followed them, the longest match first.

    Pays where text repeats: summaries, retrieval, code edits. Where nothing matches the pass is a plain one and costs
    a dictionary look-up.

    Source: Saxena 2023, "Prompt Lookup Decoding"; branches from several matches are this library's.

    Args:
        max_ngram: Longest context looked up, in tokens.
        min_ngram: Shortest; 1 matches often and is seldom right.
        max_nodes: Draft nodes at most.
        max_branches: Earlier occurrences proposed side by side, the most recent first.

    Raises:
        ConfigError: If a number is out of range.
    """

    name = "ngram"

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 2, max_nodes: int = 12, max_branches: int = 2) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(f"min_ngram must be in 1..max_ngram, got min_ngram={min_ngram} and max_ngram={max_ngram}")
        if max_nodes < 1 or max_branches < 1:
            raise ConfigError(f"max_nodes and max_branches must be 1 or more, got {max_nodes} and {max_branches}")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self.max_nodes, self.max_branches = max_nodes, max_branches

    def begin(self, prompt: Sequence[int]) -> DraftSession:
        """A session that has read the prompt."""
        return _NgramSession(self, prompt)


class _NgramSession(DraftSession):
    def __init__(self, drafter: NgramDrafter, prompt: Sequence[int]) -> None:
        self.drafter = drafter
        self.ids: list[int] = []
        self.followers: dict[Gram, list[int]] = {}  # n-gram -> places right behind it, oldest first
        self.observe(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        low, high = self.drafter.min_ngram, self.drafter.max_ngram
        for token in tokens:
            self.ids.append(token)
            end = len(self.ids)
            for n in range(low, min(high, end) + 1):
                self.followers.setdefault(tuple(self.ids[end - n :]), []).append(end)

    def draft(self, root: int, h: torch.Tensor | None, limit: int | None) -> TokenTree:
        nodes = self.drafter.max_nodes if limit is None else min(limit, self.drafter.max_nodes)
        if nodes < 1:
            return TokenTree.root_only(root)
        shape, tokens = merge_chains(self._continuations(nodes))
        return TokenTree(shape=shape, tokens=(root, *tokens))

    def _continuations(self, nodes: int) -> list[list[int]]:
        """Distinct continuations of the longest match, sharing `nodes` between them."""
        end = len(self.ids)
        for n in range(min(self.drafter.max_ngram, end), self.drafter.min_ngram - 1, -1):
            # Of the places, in rising order, the last one alone may be this very one; a loop has thousands of others.
            places = self.followers[tuple(self.ids[end - n :])][-self.drafter.max_branches - 1 :]
            recent = [place for place in reversed(places) if place < end][: self.drafter.max_branches]
            if recent:
                share = max(1, nodes // len(recent))
                return [self.ids[place : place + share] for place in recent][:nodes]
        return []
