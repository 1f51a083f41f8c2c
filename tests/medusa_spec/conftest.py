"""Drafters with a known answer, and the architectures over which the law is asserted."""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from medusa_spec import graph
from medusa_spec.attention import TreePass
from medusa_spec.backbone import Backbone
from medusa_spec.cache import SlabCache
from medusa_spec.drafters import Drafter, DraftSession, FixedDraft
from medusa_spec.testing import COMMON, tiny
from medusa_spec.tree import TokenTree, TreeShape, shape_of

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


class LookupDrafter(Drafter):
    """Knows the answer by the hidden states that lead to it, as tensors: a tree of one shape, some of its paths right.

    The first child of a node carries the answer's token, unless the place in the text says that it is wrong there.

    Args:
        states: h of every token of the text [T, H].
        text: Prompt and answer ids [T].
        shape: The tree.
        wrong: Of so many places and depths one is wrong; 0 for none.
    """

    name = "lookup"

    def __init__(self, states: torch.Tensor, text: torch.Tensor, shape: TreeShape, wrong: int = 0) -> None:
        self.states, self.shape, self.wrong = states, shape, wrong
        self.text = torch.cat([text, text.new_zeros(shape.max_depth + 2)])
        siblings = [shape.children[parent].index(node) for node, parent in enumerate(shape.parents) if node]
        self.depths, self.ranks = torch.tensor(shape.depths[1:]), torch.tensor(siblings)

    def begin(self, prompt: Sequence[int]) -> DraftSession:
        return _LookupSession(self)

    def guess(self, h: torch.Tensor) -> torch.Tensor:
        place = (self.states - h).abs().sum(dim=1).argmin(dim=0, keepdim=True) + 1  # of the root
        true = self.text.index_select(0, place + self.depths)
        off = ((place * 5 + self.depths) % self.wrong == 0).long() if self.wrong else 0
        return (true + self.ranks + off) % VOCAB


class _LookupSession(DraftSession):
    def __init__(self, drafter: LookupDrafter) -> None:
        self.drafter = drafter

    def draft(self, root: int, h: torch.Tensor | None, limit: int | None) -> TokenTree:
        return TokenTree(shape=self.drafter.shape, tokens=(root, *self.drafter.guess(h).tolist()))

    def fixed(self, h: torch.Tensor, limit: int | None) -> FixedDraft | None:
        return FixedDraft(shape=self.drafter.shape, guess=self.drafter.guess, key=self.drafter)


@pytest.fixture
def lookup() -> type[LookupDrafter]:
    """The class of drafters that know the answer by hidden states."""
    return LookupDrafter


class _Recording(TorchDispatchMode):
    """Notes every operation with its tensors, refuses those that make the host wait, and leaves no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_waiting(function, args)
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before.append((value, value.clone()))
        out = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, out))
        return out

    def undo(self) -> None:
        for tensor, value in reversed(self.before):
            tensor.copy_(value)

    def replay(self) -> None:
        for function, args, kwargs, out in self.operations:
            new = function(*args, **kwargs)
            for old, fresh in zip(tree_leaves(out), tree_leaves(new), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != fresh.data_ptr():
                    old.copy_(fresh)


class _Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_waiting(function, args)
        return function(*args, **(kwargs or {}))


def refuse_waiting(function: Any, args: Any) -> None:
    """Raises for operations whose result the host must wait for."""
    waits = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select"}
    masks = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.dtype == torch.bool]
    if function._schema.name in waits or (function._schema.name == "aten::index" and masks[:1] and len(args) > 1):
        raise RuntimeError(f"{function._schema.name}: operation not permitted when stream is capturing")


class CudaStandIn:
    """What `graph.py` asks of torch.cuda, on a CPU: recordings repeat operations on the same places of memory."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.mode, self.stack = "default", []
        stand_in = self

        class Stream:
            def wait_stream(self, other: Any) -> None:
                assert isinstance(other, Stream)

        class CUDAGraph:
            def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
                assert stand_in.inside is not None, "recordings need a stream of their own"
                self.recording = _Recording()
                self.recording.__enter__()

            def capture_end(self) -> None:
                self.recording.__exit__(None, None, None)
                with torch.inference_mode():
                    self.recording.undo()
                stand_in.log.append("record")

            def replay(self) -> None:
                stand_in.log.append("replay")
                with torch.inference_mode():
                    self.recording.replay()

        self.Stream, self.CUDAGraph = Stream, CUDAGraph
        self.inside: Any = None

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.inside = self.inside, stream
        try:
            yield
        finally:
            self.inside = before

    def current_stream(self) -> Any:
        return self.inside or self.Stream()

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 1)

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def get_sync_debug_mode(self) -> str:
        return self.mode

    def set_sync_debug_mode(self, mode: str) -> None:
        if mode == "error":
            self.stack.append(_Refusing())
            self.stack[-1].__enter__()
        elif self.stack:
            self.stack.pop().__exit__(None, None, None)
        self.mode = mode


@pytest.fixture
def cuda_stand_in(monkeypatch: pytest.MonkeyPatch) -> CudaStandIn:
    """torch.cuda as `graph.py` sees it."""
    stand_in = CudaStandIn()
    monkeypatch.setattr(graph, "cuda", stand_in)
    return stand_in


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
        logits = self._verify(copy.deepcopy(self.cache), parents, tokens)[0]
        rows = len(self.cache.lengths)
        return logits if rows == 1 else logits.unflatten(0, (rows, len(parents)))

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
        return self.backbone.verify(torch.tensor([list(tokens) * len(cache.lengths)]), tree_pass).logits


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
