from collections.abc import Sequence

import pytest
import torch

from medusa_spec import Drafter, DraftSession, MedusaModel, TokenTree
from medusa_spec.testing import tiny
from medusa_spec.tree import merge_chains


class Counting(Drafter):
    """A user's own drafter: guesses that ids go on by one, and notes what it is told."""

    name = "counting"

    def __init__(self) -> None:
        self.prompt: list[int] = []
        self.told: list[int] = []
        self.limits: list[int | None] = []

    def begin(self, prompt: Sequence[int]) -> DraftSession:
        self.prompt, self.told, self.limits = list(prompt), [], []
        return CountingSession(self)


class CountingSession(DraftSession):
    def __init__(self, drafter: Counting) -> None:
        self.drafter = drafter

    def draft(self, root: int, h: torch.Tensor | None, limit: int | None) -> TokenTree:
        assert self.drafter.told[-1] == root
        self.drafter.limits.append(limit)
        count = 2 if limit is None else min(limit, 2)
        shape, tokens = merge_chains([[(root + step) % 128 for step in range(1, count + 1)]])
        return TokenTree(shape=shape, tokens=(root, *tokens))

    def observe(self, tokens: Sequence[int]) -> None:
        self.drafter.told.extend(tokens)


def test_a_drafter_of_ones_own_decodes_what_the_target_says() -> None:
    target, ids, drafter = tiny("llama"), torch.arange(3, 10)[None], Counting()
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = target.generate(ids, **settings)
    model = MedusaModel(target, drafter=drafter, probe=False)
    assert torch.equal(model.generate(ids, **settings), expected)
    assert [*drafter.prompt, *drafter.told] == expected[0].tolist()  # told everything, once and in order
    assert set(drafter.limits) == {None}
    model.generate(ids, draft_nodes=1, **settings)
    assert set(drafter.limits) == {1} and set(model.last_stats.pass_sizes) == {2}


def test_a_drafter_that_lacks_a_method_cannot_be_made() -> None:
    class Half(Drafter):
        name = "half"

    with pytest.raises(TypeError, match="begin"):
        Half()
