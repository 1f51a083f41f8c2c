"""Acceptance: from the target's logits at the nodes to the path that the target itself would have taken."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from medusa_spec.tree import TokenTree


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a token is chosen from processed logits.

    Attributes:
        name: As printed.
        lossless: Whether outputs follow the target's own distribution exactly (greedy: are its own tokens).
        choose: From processed logits [1, V], float32, to a token id.
        batched: Whether the choice at a node depends on its logits alone, so that all nodes may be chosen at once.
    """

    name: str
    lossless: bool
    choose: Callable[[torch.Tensor], int]
    batched: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({'lossless' if self.lossless else 'not lossless'})"


def choose_greedy(scores: torch.Tensor) -> int:
    """The arg-max, the lowest id on equal logits."""
    return int(torch.argmax(scores, dim=-1))


def choose_sampled(scores: torch.Tensor) -> int:
    """A draw from softmax(scores), by the call with which plain sampling draws.

    Tokens are drawn one per output position and in their order, never for a node that turns out not to be reached. So
    the random state moves as in plain decoding, and the same seed gives the same tokens.
    """
    return int(torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1))


GREEDY = Rule(name="greedy", lossless=True, choose=choose_greedy, batched=True)
EXACT_SAMPLING = Rule(name="exact_sampling", lossless=True, choose=choose_sampled)


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The outcome of a walk.

    Attributes:
        path: Accepted nodes, the root first.
        tokens: What the target chose at each of them; the last is the bonus.
        gained: How many of these belong to the text: what is behind its end does not.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    gained: int


def walk(tree: TokenTree, choose: Callable[[int], int], stop: Callable[[int], bool] | None = None) -> Accepted:
    """Walks from the root along the target's own choices while they are in the tree.

    ```
    17 ─ 5 ─ 7        the target chooses 5 after 17, 8 after 17 5: path (0, 1), tokens (5, 8), 8 being the bonus
    └─── 9
    ```

    The walk never compares probabilities: at each node the target's token is drawn exactly as plain decoding would
    draw it, and the tree only decides whether the next logits are already there. That is why it is lossless for any
    drafter.

    Args:
        tree: The draft.
        choose: From a node to the target's token there; called once per accepted node, in order.
        stop: Told each token chosen; true ends the walk there.
    """
    path, tokens = [0], [choose(0)]
    while stop is None or not stop(tokens[-1]):
        child = tree.child_with(path[-1], tokens[-1])
        if child is None:
            break
        path.append(child)
        tokens.append(choose(child))
    return Accepted(path=tuple(path), tokens=tuple(tokens), gained=len(tokens))
