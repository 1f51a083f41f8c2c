"""Drafters with a known answer, and the architectures over which the law is asserted."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from medusa_spec.drafters import Drafter, DraftSession
from medusa_spec.testing import tiny
from medusa_spec.tree import TokenTree, shape_of

VOCAB = 128

ARCHITECTURES = {
    "llama": "llama",
    "qwen3": "qwen3",
    "mistral-window": "mistral",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt2": "gpt2",
    "gpt-neox": "gpt_neox",
    "phi3": "phi3",
    "mixtral": "mixtral",
    "gpt-oss": "gpt_oss",
}
"""Names in test ids, and the architecture of `medusa_spec.testing.tiny` that each stands for."""


def build(name: str, **arguments: Any) -> PreTrainedModel:
    """A tiny model whose generation never ends by itself."""
    model = tiny(ARCHITECTURES[name], **arguments)
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return model


@pytest.fixture(params=ARCHITECTURES, ids=list(ARCHITECTURES))
def any_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Each architecture in turn."""
    return build(request.param)


@pytest.fixture
def llama() -> PreTrainedModel:
    """One tiny float64 model, untouched."""
    return build("llama")


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    """`make_model("gpt2", max_position_embeddings=32)`: an architecture with other settings."""
    return build


class ScriptedDrafter(Drafter):
    """Knows the answer and hides it in random trees.

    Args:
        answer: Prompt and answer ids, as the target will say them.
        right: Probability that a node below an accepted path gets the true token among its children; 1 always
            accepts, 0 never does.
        seed: Of the trees.
        nodes: Draft nodes per tree.
        lone: Probability of a tree of one node.
    """

    name = "scripted"

    def __init__(
        self, answer: Sequence[int], *, right: float, seed: int = 0, nodes: int = 9, lone: float = 0.1
    ) -> None:
        self.answer, self.right, self.nodes, self.lone = list(answer), right, nodes, lone
        self.random = random.Random(seed)

    def begin(self, prompt: Sequence[int]) -> DraftSession:
        return _ScriptedSession(self, len(prompt))


class _ScriptedSession(DraftSession):
    def __init__(self, drafter: ScriptedDrafter, length: int) -> None:
        self.drafter, self.length = drafter, length

    def observe(self, tokens: Sequence[int]) -> None:
        self.length += len(tokens)

    def draft(self, root: int, h: torch.Tensor | None, limit: int | None) -> TokenTree:
        dice, answer = self.drafter.random, self.drafter.answer
        nodes = self.drafter.nodes if limit is None else min(limit, self.drafter.nodes)
        if dice.random() < self.drafter.lone:
            return TokenTree.root_only(root)
        place = self.length  # of the answer's first token behind the root, which was observed last
        parents, tokens, truth = [-1], [root], [True]
        for node in range(1, nodes + 1):
            parent = dice.choice([node - 1, dice.randrange(node)])
            depth = self._depth(parents, parent)
            true_token = answer[place + depth] if place + depth < len(answer) else None
            siblings = [tokens[n] for n in range(1, node) if parents[n] == parent]
            is_right = truth[parent] and true_token not in (None, *siblings) and dice.random() < self.drafter.right
            wrong = [t for t in range(VOCAB) if t not in siblings and t != true_token]
            parents.append(parent)
            tokens.append(true_token if is_right else dice.choice(wrong))
            truth.append(is_right)
        return TokenTree(shape=shape_of(tuple(parents)), tokens=tuple(tokens))

    @staticmethod
    def _depth(parents: list[int], node: int) -> int:
        depth = 0
        while parents[node] >= 0:
            node, depth = parents[node], depth + 1
        return depth


@pytest.fixture
def scripted() -> type[ScriptedDrafter]:
    """The class of drafters that know the answer."""
    return ScriptedDrafter


@pytest.fixture
def prompt() -> Callable[[int, int], torch.Tensor]:
    """`prompt(length, seed)`: random ids [1, length]."""

    def make(length: int, seed: int = 0) -> torch.Tensor:
        return torch.randint(2, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))

    return make
