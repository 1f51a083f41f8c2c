"""Whether an answer goes round in circles. Knows ids alone."""

from collections.abc import Sequence

WINDOW = 64
"""Last tokens looked at."""

GRAM = 8
"""Length of the pieces that are counted."""


def loops(tokens: Sequence[int]) -> bool:
    """Whether an answer ends in repetition: most 8-grams of its last 64 tokens occur more than once.

    A small model under greedy decoding loops, and a loop is easy to guess: it flatters μ.
    """
    last = tokens[-WINDOW:]
    grams = [tuple(last[i : i + GRAM]) for i in range(len(last) - GRAM + 1)]
    return len(grams) > GRAM and len(set(grams)) < len(grams) / 2
