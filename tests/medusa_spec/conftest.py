"""Drafters with a known answer, and the architectures over which the law is asserted."""

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from medusa_spec.attention import TreePass
from medusa_spec.backbone import Backbone
from medusa_spec.cache import SlabCache
from medusa_spec.drafters import Drafter, DraftSession
from medusa_spec.testing import COMMON, tiny
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


WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
"""Sizes at which q, k, v and gate, up are whole blocks of the kernels, so that everything can be prepared."""

MIXTURE = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "layer_types": ALTERNATING}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
WIDE_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 8, "head_dim": 16},
    "gemma2": {**GEMMA, "attn_implementation": "eager"},
    "gemma3_text": GEMMA,
    "gpt2": {},
    "gpt_neox": {},
    "phi": {},
    "phi3": {},
    "mixtral": {**MIXTURE, "num_local_experts": 4},
    "gpt_oss": {
        **MIXTURE,
        "num_local_experts": 4,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ALTERNATING,
        "rope_parameters": YARN,
    },
    "olmo": {"clip_qkv": 8.0},
    "olmo2": {},
    "starcoder2": {},
    "cohere": {},
    "granite": {"residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "exaone4": {"sliding_window": 8, "layer_types": ALTERNATING},
}
"""Settings by `model_type`: biases, head norms, windows, soft-caps, sandwich norms, partial and interleaved rotation,
clamps, multipliers, layers without rotation."""


def wide(name: str, *, dtype: torch.dtype, **overrides: Any) -> PreTrainedModel:
    """A frozen random model of three layers that is large enough for every kernel."""
    config = AutoConfig.for_model(name, **{**COMMON, **WIDE, **WIDE_ARCHITECTURES[name], **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(dtype).eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return model


@pytest.fixture
def make_wide() -> Callable[..., PreTrainedModel]:
    """`make_wide("qwen2", dtype=torch.bfloat16)`: see `wide`."""
    return wide


class Passes:
    """Passes over the nodes of a tree behind a prompt, in one and one by one.

    Args:
        model: A causal LM, not wrapped.
        ids: The prompt [1, T], or prompts [B, T].
        reserve: Slots that the cache keeps free.
    """

    def __init__(self, model: Any, ids: torch.Tensor, reserve: int = 64) -> None:
        self.backbone = Backbone(model)
        self.cache = SlabCache(self.backbone.config, batch=len(ids))
        self.backbone.forward(ids, cache=self.cache, last_only=True)
        self.cache.seal(reserve)

    def __enter__(self) -> "Passes":
        return self

    def __exit__(self, *_: Any) -> None:
        self.backbone.detach()

    def tree(self, parents: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Logits [N, V] of one pass over all nodes; [B, N, V] of several prompts."""
        logits = self._verify(copy.deepcopy(self.cache), parents, tokens)
        return logits[0] if len(logits) == 1 else logits

    def path(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [V] behind a path, by one-token passes."""
        cache = copy.deepcopy(self.cache)
        for token in tokens:
            logits = self._verify(cache, (-1,), (token,))
            cache.keep(0, [0])
        return logits[0, 0]

    def paths(self, parents: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Logits [N, V] of every node, by one-token passes over its path."""
        return torch.stack([self.path([tokens[n] for n in ancestors(parents, node)]) for node in range(len(parents))])

    def _verify(self, cache: SlabCache, parents: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        cache.make_room(len(parents))
        tree_pass = TreePass(shape=shape_of(tuple(parents)), cache=cache, device=torch.device("cpu"))
        return self.backbone.verify(torch.tensor([list(tokens)] * len(cache.lengths)), tree_pass).logits


def ancestors(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root to `node`."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@pytest.fixture
def passes() -> type[Passes]:
    """The class of passes over trees."""
    return Passes


@pytest.fixture
def random_tree() -> Callable[..., tuple[tuple[int, ...], list[int]]]:
    """`random_tree(nodes, seed)`: parents and tokens."""

    def make(nodes: int, seed: int = 0) -> tuple[tuple[int, ...], list[int]]:
        dice = random.Random(seed)
        parents = (-1, *(dice.choice([node - 1, dice.randrange(node)]) for node in range(1, nodes)))
        return parents, [dice.randrange(2, VOCAB) for _ in range(nodes)]

    return make
