"""Drafting with what followed before, in this text and in others. Needs no training; knows ids only."""

from array import array
from collections.abc import Sequence

import torch

from medusa_spec.drafters.base import Drafter, DraftSession
from medusa_spec.drafters.continuations import Continuations
from medusa_spec.drafters.earlier_texts import EarlierTexts
from medusa_spec.drafters.evidence import Evidence
from medusa_spec.drafters.suffix_corpus import SuffixCorpus
from medusa_spec.drafters.text_index import LEAST_TOKENS, LONGEST_MATCH, Place, TextIndex
from medusa_spec.errors import ConfigError
from medusa_spec.tree import Candidates, Prices, TokenTree

REQUEST_TOKENS = 1 << 17
"""Most tokens of the running text that are looked at, 20 bytes each."""

USUAL_PRICES = Prices(token_seconds=1.0, level_seconds=0.0, pass_seconds=((1, 1.0), (25, 2.2)))
"""Until a session is told other ones: a node costs a twentieth of a token, and 24 are enough."""

LEAST_VALUE = 0.01
"""Value below which a node is not drafted even where it costs nothing."""


class SuffixDrafter(Drafter):
    """Looks the end of the text up in itself and in earlier texts, and proposes what followed, the likeliest as a tree.

    Chances are frequencies: how often a guess with the same support was right so far (`Evidence`); drafts for which the
    corpus was needed are counted by themselves. A node is drafted if its chance pays its price. Where nothing matches
    the pass is a plain one and costs microseconds, or some tens of them for every file of a corpus.

    Args:
        session_tokens: Most tokens of earlier requests that are remembered, 20 bytes each; 0 for none, so that a
            request's draft depends on nothing but its own text and what was counted.
        max_depth: Longest continuation.
        prices: What nodes cost until a session is told.
        corpus: Texts on the disk, asked for matches longer than those at hand. Only `add` writes into it.

    Raises:
        ConfigError: If a number is out of range.
    """

    name = "suffix"

    def __init__(
        self,
        *,
        session_tokens: int = 1 << 20,
        max_depth: int = 24,
        prices: Prices = USUAL_PRICES,
        corpus: SuffixCorpus | None = None,
    ) -> None:
        if max_depth < 1:
            raise ConfigError(f"max_depth must be 1 or more, got {max_depth}")
        if session_tokens and session_tokens < LEAST_TOKENS:
            raise ConfigError(f"session_tokens must be 0 or {LEAST_TOKENS} or more, got {session_tokens}")
        self.max_depth, self.prices = max_depth, prices
        self.corpus, self.earlier = corpus, EarlierTexts(session_tokens)
        self.evidence, self.corpus_evidence = Evidence(), Evidence()

    def begin(self, prompt: Sequence[int]) -> DraftSession:
        """A session that has read the prompt, and knows the texts of sessions that are gone and of the corpus."""
        self.earlier.take_over()
        if self.corpus is not None:
            self.corpus.refresh()
        return _SuffixSession(self, prompt)


class _SuffixSession(DraftSession):
    def __init__(self, drafter: SuffixDrafter, prompt: Sequence[int]) -> None:
        self.drafter, self.prices = drafter, drafter.prices
        self.evidence, self.corpus_evidence = Evidence(drafter.evidence), Evidence(drafter.corpus_evidence)
        self.text = array("i", prompt)
        self.index: TextIndex | None = None
        self.indexed = 0
        self.continuations: Continuations | None = None

    def price(self, prices: Prices) -> None:
        self.prices = prices

    def observe(self, tokens: Sequence[int]) -> None:
        if self.continuations is not None:
            self.continuations.learn(tokens)
            self.continuations = None
        self.text.extend(tokens)

    def propose(self, root: int, h: torch.Tensor | None, candidates: Candidates) -> bool:
        self.continuations = None
        at_hand = self.places()
        beyond = self.places_in_corpus(above=max((place.length for place in at_hand), default=1))
        if at_hand or beyond:
            self.continuations = Continuations(at_hand + beyond, self.corpus_evidence if beyond else self.evidence)
            self.continuations.add_to(candidates, max(LEAST_VALUE, self.prices.node_price))
        return True

    def draft(self, root: int, h: torch.Tensor | None, limit: int | None) -> TokenTree:
        candidates = Candidates()
        self.propose(root, h, candidates)
        if len(candidates.values) == 1:
            return TokenTree.root_only(root)
        chosen = candidates.best(self.prices, limit)
        return TokenTree(shape=chosen.shape, tokens=(root, *chosen.tokens))

    def places(self) -> list[Place]:
        """Where the end of the text stood: in itself, and in others where more of it stood there."""
        if self.index is None:  # what is decoded plainly needs no index, and teaches later requests nothing
            self.index = TextIndex(REQUEST_TOKENS)
            self.drafter.earlier.watch(self, self.text)
        self.index.add(self.text[self.indexed :])
        self.indexed = len(self.text)
        context, depth = self.text[-LONGEST_MATCH:], self.drafter.max_depth
        found = self.index.find(context, depth=depth)
        longest = max((place.length for place in found), default=1)
        return found + self.drafter.earlier.find(context, above=longest, depth=depth)

    def places_in_corpus(self, above: int) -> list[Place]:
        """Where more than so many tokens of the end of the text stood in the corpus."""
        if self.drafter.corpus is None:
            return []
        return self.drafter.corpus.find(self.text[-LONGEST_MATCH:], above=above, depth=self.drafter.max_depth)
