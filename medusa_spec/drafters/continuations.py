"""What followed at several places, as guesses of a tree, and what became of them. Knows no texts."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from medusa_spec.drafters.evidence import Evidence, Support, bucket_of
from medusa_spec.drafters.text_index import Place
from medusa_spec.tree import Candidates

WIDTH = 4
"""Most guesses below a node."""


class Guess(NamedTuple):
    """A token that followed, below what followed before it.

    Attributes:
        token: Its id.
        support: What speaks for it.
        length: Tokens that match up to it, if all before it are right.
        below: Guesses below it.
    """

    token: int
    support: Support
    length: int
    below: "list[Guess]"


class Continuations:
    """Guesses from the places where a context stood before.

    Below a right guess the context has grown by it, and stands at those of the places alone where it followed: so the
    same question is asked again, with a longer match and fewer places.

    ```
    places (3, [5 6 7]), (3, [5 8])          root ─ 5: all agree, 3 tokens match ─ 6: half of them, 4 match ─ 7: alone
                                                                                 └ 8: second, 4 match
    ```

    Args:
        places: Where the context stood; those whose match is not half as long as the longest say nothing.
        evidence: Gives the chances, and learns what became of the guesses.
    """

    def __init__(self, places: Sequence[Place], evidence: Evidence) -> None:
        longest = max((place.length for place in places), default=0)
        self.places = [place for place in places if 2 * place.length >= longest]
        self.evidence = evidence
        self.guesses: list[Guess] = []

    def add_to(self, candidates: Candidates, floor: float) -> None:
        """Adds the guesses to a pool, as far as their values reach the floor."""
        open_ones: list[tuple[int, int, Sequence[Place], list[Guess]]] = [(0, 0, self.places, self.guesses)]
        values = candidates.values
        while open_ones:
            node, depth, places, guesses = open_ones.pop()
            if len(places) == 1:
                self._follow(places[0], depth, guesses, candidates, node, floor)
                continue
            for guess, those in _ranked(places, depth):
                guesses.append(guess)
                chance = self.evidence.chance(guess.support, guess.length)
                if values[node] * chance >= floor:
                    child = candidates.add(node, guess.token, chance)
                    open_ones.append((child, depth + 1, those, guess.below))

    def _follow(
        self, place: Place, depth: int, guesses: list[Guess], candidates: Candidates, node: int, floor: float
    ) -> None:
        """Adds what followed at one place, all that is left: most of what is drafted, so it is done in one go."""
        value, row = candidates.values[node], self.evidence.row(Support.ALONE)
        for length, token in enumerate(place.tokens[depth:], start=place.length + depth):
            below: list[Guess] = []
            guesses.append(Guess(token, Support.ALONE, length, below))
            chance = row[bucket_of(length)]
            value *= chance
            if value < floor:
                return
            node, guesses = candidates.add(node, token, chance), below

    def learn(self, tokens: Iterable[int]) -> None:
        """Is told what the target said instead or likewise: every guess below what was right counts."""
        guesses = self.guesses
        for token in tokens:
            below: list[Guess] = []
            for guess in guesses:
                right = guess.token == token
                self.evidence.learn(guess.support, guess.length, right)
                if right:
                    below = guess.below
            guesses = below
            if not guesses:
                return


def _ranked(places: Sequence[Place], depth: int) -> list[tuple[Guess, Sequence[Place]]]:
    """Guesses at a depth, the likeliest first, each with the places where it followed."""
    groups: dict[int, list[Place]] = {}
    for place in places:
        if depth < len(place.tokens):
            groups.setdefault(place.tokens[depth], []).append(place)
    found = [(max(place.length for place in those), len(those), token) for token, those in groups.items()]
    if len(found) > 1:
        found.sort(key=lambda entry: entry[:2], reverse=True)  # of equals the most recent stays first
    total = sum(count for _, count, _ in found)
    return [
        (Guess(token, _support(rank, count, total), length + depth, []), groups[token])
        for rank, (length, count, token) in enumerate(found[:WIDTH])
    ]


def _support(rank: int, count: int, total: int) -> Support:
    if rank:
        return Support.SECOND if rank == 1 else Support.FURTHER
    if count == total:
        return Support.ALONE if count == 1 else Support.AGREED
    return Support.MOST if 2 * count > total else Support.FEW
