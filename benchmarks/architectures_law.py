"""Is what this library says what `generate` says? Asked of one tiny model. Knows no architectures."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from medusa_spec import MedusaModel
from medusa_spec.drafters import Drafter, DraftSession, NgramDrafter
from medusa_spec.errors import MedusaError
from medusa_spec.tree import TokenTree, shape_of

NEW_TOKENS = 12
SHORT, MIDDLE, LONG = 3, 13, 29
"""Prompt lengths; windows of tiny models are 8 tokens wide."""


class RandomTrees(Drafter):
    """Knows the answer and hides it in random trees, so that paths of all kinds are accepted.

    Args:
        answer: Prompt and answer ids.
        below: Number of ids.
        seed: Of the trees.
    """

    name = "random trees"

    def __init__(self, answer: Sequence[int], below: int, seed: int) -> None:
        self.answer, self.below, self.random = list(answer), below, random.Random(seed)

    def begin(self, prompt: Sequence[int]) -> DraftSession:
        """See `Drafter`."""
        return _RandomTrees(self, len(prompt))


class _RandomTrees(DraftSession):
    def __init__(self, drafter: RandomTrees, length: int) -> None:
        self.drafter, self.length = drafter, length

    def observe(self, tokens: Sequence[int]) -> None:
        self.length += len(tokens)

    def draft(self, root: int, h: torch.Tensor | None, limit: int | None) -> TokenTree:
        dice, answer = self.drafter.random, self.drafter.answer
        parents, tokens, depths, right = [-1], [root], [0], [True]
        for node in range(1, dice.choice((1, 4, 7, 9))):
            parent = dice.choice([node - 1, dice.randrange(node)])
            siblings = [tokens[n] for n in range(1, node) if parents[n] == parent]
            place = self.length + depths[parent]
            true = answer[place] if place < len(answer) else -1
            is_right = right[parent] and true >= 0 and true not in siblings and dice.random() < 0.8
            wrong = [t for t in range(self.drafter.below) if t not in siblings and t != true]
            parents.append(parent)
            depths.append(depths[parent] + 1)
            tokens.append(true if is_right else dice.choice(wrong))
            right.append(is_right)
        return TokenTree(shape=shape_of(tuple(parents)), tokens=tuple(tokens))


class Law:
    """The law for one model.

    Args:
        model: Tiny, float64, not wrapped.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.below = min(model.get_input_embeddings().weight.shape[0], model.config.get_text_config().vocab_size)

    def plain(self, length: int, *, sample: bool = False, **arguments: Any) -> list[int]:
        """Prompt and answer of plain `generate`."""
        return self._generate(self.model, length, sample, **arguments)

    def inconsistent(self) -> str | None:
        """Why plain decoding with a cache is not plain decoding without, in words; None if it is."""
        for length in (SHORT, LONG):
            answers = []
            for use_cache in (True, False):
                try:
                    answers.append(self.plain(length, **({} if use_cache else {"use_cache": False})))
                except Exception as error:
                    where = "with" if use_cache else "without"
                    return f"plain generate fails {where} a cache: {words_of(error)}"
            if answers[0] != answers[1]:
                place = next(i for i, (a, b) in enumerate(zip(*answers, strict=True)) if a != b) - length
                return f"plain generate differs with and without a cache, from new token {place + 1} on"
        return None

    def examine(self) -> dict[str, Any]:
        """Wraps the model and compares: verdict, route and what the probe said."""
        arms = [(SHORT, False), (SHORT, True), (MIDDLE, False), (LONG, False), (LONG, True)]
        answers = {arm: self.plain(arm[0], sample=arm[1]) for arm in arms}
        try:
            wrapped = MedusaModel(self.model, drafter="ngram", speculation="fixed")
        except MedusaError as error:
            return {"verdict": "refused", "reason": str(error)}
        found = {"route": wrapped.route, "probe": wrapped.probe_result, "accepted": 0}
        try:
            for number, (arm, answer) in enumerate(answers.items()):
                drafters: list[Drafter] = [RandomTrees(answer, self.below, seed=number)]
                if arm[0] == MIDDLE:
                    drafters.append(NgramDrafter())
                for drafter in drafters:
                    ours = self._generate(wrapped, *arm, drafter=drafter)
                    found["accepted"] += wrapped.last_stats.accepted if wrapped.last_stats else 0
                    if ours != answer:
                        return {**found, "verdict": "wrong", "reason": _difference(ours, answer, arm, drafter)}
        except MedusaError as error:
            return {**found, "verdict": "refused", "reason": str(error)}
        finally:
            wrapped.detach()
        answer = answers[MIDDLE, False]
        heads = MedusaModel(self.model, speculation="fixed")
        ours = self._generate(heads, MIDDLE, False)
        heads.detach()
        if ours != answer:
            return {**found, "verdict": "wrong", "reason": _difference(ours, answer, (MIDDLE, False), heads.drafter)}
        if self.plain(MIDDLE) != answer:
            return {**found, "verdict": "wrong", "reason": "after detach() the model says something else"}
        return {**found, "verdict": "exact", "reason": None}

    def _generate(self, model: Any, length: int, sample: bool, **arguments: Any) -> list[int]:
        ids = torch.randint(3, self.below, (1, length), generator=torch.Generator().manual_seed(length))
        torch.manual_seed(11)
        out = model.generate(input_ids=ids, max_new_tokens=NEW_TOKENS, do_sample=sample, **arguments)
        return out[0].tolist()


def _difference(ours: list[int], answer: list[int], arm: tuple[int, bool], drafter: Drafter) -> str:
    place = next((i for i, (a, b) in enumerate(zip(ours, answer, strict=False)) if a != b), min(len(ours), len(answer)))
    how = "sampled" if arm[1] else "greedy"
    return f"{how}, prompt of {arm[0]}, {drafter.name}: differs from new token {place - arm[0] + 1} on"


def words_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
