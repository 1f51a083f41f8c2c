from collections.abc import Callable, Sequence

import pytest
import torch

from medusa_spec import Drafter, DraftSession, MedusaModel, TokenTree
from medusa_spec.errors import ConfigError
from medusa_spec.testing import tiny
from medusa_spec.tree import chain, merge_chains, shape_of


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


class Careless(Drafter):
    """A drafter that returns what it is told to."""

    name = "careless"

    def __init__(self, made: Callable[[int], object]) -> None:
        self.made = made

    def begin(self, prompt: Sequence[int]) -> DraftSession:
        made = self.made

        class Session(DraftSession):
            def draft(self, root: int, h: torch.Tensor | None, limit: int | None) -> TokenTree:
                return made(root)  # type: ignore[return-value]

        return Session()


def pair(*tokens: object) -> TokenTree:
    return TokenTree(shape=chain(len(tokens) - 1), tokens=tokens)  # type: ignore[arg-type]


BROKEN: dict[str, tuple[Callable[[int], object], str]] = {
    "another root": (lambda root: pair((root + 1) % 128, 5), "root"),
    "no such id": (lambda root: pair(root, 128), r"0\.\.127, got 128"),
    "a negative id": (lambda root: pair(root, -1), "got -1"),
    "no id": (lambda root: pair(root, 5.0), r"got 5\.0"),
    "no tree": (lambda root: [root, 5], "TokenTree, got list"),
    "nothing": (lambda root: None, "TokenTree, got NoneType"),
    "too many nodes": (lambda root: pair(root, 5, 6, 7), "at most 2 draft nodes, got 3"),
}


@pytest.mark.parametrize(("made", "named"), BROKEN.values(), ids=list(BROKEN))
def test_a_tree_that_breaks_the_contract_is_an_error_and_never_other_text(
    made: Callable[[int], object], named: str
) -> None:
    target, ids = tiny("llama"), torch.arange(3, 10)[None]
    model = MedusaModel(target, drafter=Careless(made), probe=False)
    with pytest.raises(ConfigError, match=named):
        model.generate(ids, max_new_tokens=12, do_sample=False, draft_nodes=2)
    settings = {"max_new_tokens": 12, "do_sample": False}
    expected = target.generate(ids, **settings)
    assert torch.equal(model.generate(ids, draft_nodes=0, **settings), expected)  # and the model is as it was


def test_equal_siblings_change_nothing() -> None:
    target, ids = tiny("llama"), torch.arange(3, 10)[None]
    settings = {"max_new_tokens": 12, "do_sample": False}
    expected = target.generate(ids, **settings)
    shape = shape_of((-1, 0, 0, 1, 2))

    class Twice(Careless):
        def begin(self, prompt: Sequence[int]) -> DraftSession:
            place = [len(prompt)]
            session = super().begin(prompt)

            def draft(root: int, h: torch.Tensor | None, limit: int | None) -> TokenTree:
                first, second = [*expected[0].tolist(), 0, 0][place[0] : place[0] + 2]
                return TokenTree(shape=shape, tokens=(root, first, first, second, second))

            session.draft = draft  # type: ignore[method-assign]
            session.observe = lambda tokens: place.__setitem__(0, place[0] + len(tokens))  # type: ignore
            return session

    model = MedusaModel(target, drafter=Twice(lambda root: None), probe=False)
    assert torch.equal(model.generate(ids, **settings), expected)
    assert model.last_stats.accepted > 0
