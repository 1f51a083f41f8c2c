"""What proposes a tree. Knows committed tokens and h, never the target's choices ahead of time."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import index

import torch

from medusa_spec.drafters.asking import Drafting, answered
from medusa_spec.errors import ConfigError
from medusa_spec.tree import Candidates, Prices, TokenTree, TreeShape


@dataclass(frozen=True, kw_only=True, eq=False)
class FixedDraft:
    """A draft whose shape never changes and whose tokens are computed where h is, with nothing read by the host.

    Attributes:
        shape: The tree.
        guess: From h [H] to the tokens of the draft nodes, int64 [N - 1]; siblings must differ.
        key: Equal for drafts that compute the same in the same places of memory, so that a recorded one may be reused.
    """

    shape: TreeShape
    guess: Callable[[torch.Tensor], torch.Tensor]
    key: Hashable


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadStates:
    """What the target computed at tokens that are part of the text now.

    Attributes:
        h: [T, H], the tensor that entered the LM head.
        layers: [T, L, H], the inputs of the layers that the drafter asked for; None if for none.
    """

    h: torch.Tensor
    layers: torch.Tensor | None = None


class DraftSession(ABC):
    """A drafter's state for one request; never shared between threads.

    Attributes:
        levels: Levels of the last draft, one after the other, for what each costs; 0 where that does not count.
    """

    levels: int = 0

    @abstractmethod
    def draft(self, root: int, h: torch.Tensor | None, limit: int | None) -> TokenTree:
        """Proposes a tree.

        Args:
            root: The token that the target has just chosen; it is the tree's root.
            h: [H], the target's hidden state from which it chose the root; None if the drafter does not need it.
            limit: Most draft nodes wanted; None leaves it to the drafter.

        Returns:
            A tree of at most `limit` draft nodes; a lone root means plain decoding for this pass.
        """

    @property
    def bytes_per_token(self) -> int:
        """Memory that it keeps for every token of the text; 0 if it keeps nothing that counts."""
        return 0

    def propose(self, root: int, h: torch.Tensor | None, candidates: Candidates) -> bool:
        """Adds its guesses to those of others, with the chances that they are right, instead of making a tree of them.

        Args:
            root: As for `draft`, and so is h.
            h: [H] or None.
            candidates: What others have proposed already; tokens are the target's ids.

        Returns:
            False if it has no chances to give: its trees stand alone.
        """
        return False

    def drafting(self, root: int, h: torch.Tensor | None, limit: int | None) -> Drafting[TokenTree]:
        """`draft` as a generator that asks the heads as it goes, so that rows of a batch are drafted for together.

        One that asks nothing, as this, simply drafts.
        """
        return answered(self.draft(root, h, limit))

    def proposing(self, root: int, h: torch.Tensor | None, candidates: Candidates) -> Drafting[bool]:
        """`propose` as such a generator."""
        return answered(self.propose(root, h, candidates))

    def draft_free(self, root: int, limit: int | None) -> TokenTree:
        """What can be proposed in no time to speak of, while drafts that take some do not pay; a lone root for nothing.

        Args:
            root: As for `draft`, and so is limit.
            limit: Most draft nodes.
        """
        return TokenTree.root_only(root)

    def fixed(self, h: torch.Tensor, limit: int | None) -> FixedDraft | None:
        """The same proposals as `draft` makes for hidden states like h [H], in fixed form; None where there is none."""
        return None

    def read(self, ids: Sequence[int], states: ReadStates) -> None:  # noqa: B027
        """Is shown what the target computed at the tokens `ids`, in the order of the text, before the next `draft`.

        Only of drafters that ask for it; see `Drafter.reads`. The beginning of the text may be missing, where the
        target itself had it in a cache.
        """

    def forget(self) -> None:  # noqa: B027
        """Is told that the text will be shown again from its beginning: the target reads it anew."""

    def price(self, prices: Prices) -> None:  # noqa: B027
        """Is told before a `draft` what passes and tokens cost now, for trees that weigh their nodes."""

    def observe(self, tokens: Sequence[int]) -> None:  # noqa: B027 (most drafters need not override it)
        """Is told the tokens emitted by the last pass, before the next `draft`; the last of them will be its root."""


class Drafter(ABC):
    """Anything that proposes trees: heads, n-gram lookup, the user's own.

    Attributes:
        name: As printed.
        reads: Layers of the target, by number, whose inputs sessions are shown together with h at every token of the
            text; none of them for h alone, None to be shown nothing.
    """

    name: str
    reads: tuple[int, ...] | None = None

    @property
    def level_share(self) -> float:
        """Time of one more level of a draft, as a share of a pass over one token; 0 if it does not count."""
        return 0.0

    @property
    def hit(self) -> float | None:
        """Chance that its first guess is right, by its calibration; None if it has none, or its drafts cost nothing."""
        return None

    def expected(self) -> Sequence[float] | None:
        """Expected accepted tokens of its best tree of 0, 1, 2, … draft nodes, for drafters that make trees of the size
        that they are asked for; None if it sizes its trees itself."""
        return None

    @abstractmethod
    def begin(self, prompt: Sequence[int]) -> DraftSession:
        """A session for a request with these prompt ids (padding removed)."""


def check_draft(tree: TokenTree, *, root: int, limit: int | None, ids_below: int) -> None:
    """Holds a drafter to its word: with another root the target would be asked to continue what it has not said.

    Args:
        tree: What `DraftSession.draft` returned.
        root: The token that it was given.
        limit: The limit that it was given.
        ids_below: Number of ids that have an input embedding.

    Raises:
        ConfigError: If it is no tree, has another root, more nodes than asked for, or ids that are none.
    """
    if not isinstance(tree, TokenTree):
        raise ConfigError(f"the drafter must return a TokenTree, got {type(tree).__name__}; mend its draft()")
    if tree.tokens[0] != root:
        raise ConfigError(
            f"the drafter's tree must have the root {root}, the token that the target has just chosen, got "
            f"{tree.tokens[0]}; mend its draft()"
        )
    if limit is not None and tree.size - 1 > limit:
        raise ConfigError(f"the drafter must return at most {limit} draft nodes, got {tree.size - 1}; mend its draft()")
    for token in tree.tokens:
        try:
            known = 0 <= index(token) < ids_below
        except TypeError:
            known = False
        if not known:
            raise ConfigError(
                f"the drafter's tokens must be ids in 0..{ids_below - 1}, got {token!r}; mend its draft()"
            )
