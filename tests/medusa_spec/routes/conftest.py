"""Tiny models of architectures that the attention interface does not serve, and passes over trees of them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from medusa_spec.attention import TreePass
from medusa_spec.backbone import Backbone
from medusa_spec.routes import NodesRoute, Route
from medusa_spec.routes.text_state import TextState
from medusa_spec.testing import COMMON
from medusa_spec.tree import shape_of

BUSH = shape_of((-1, 0, 1, 0, 3, 2, 3))
MIXERS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
OTHERS: dict[str, dict[str, Any]] = {
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "bloom": {"n_head": 4, "n_layer": 2},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "qwen3_next": {
        **MIXERS,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "experts_implementation": "eager",
    },
    "rwkv": {"attention_hidden_size": 32, "context_length": 128},
}


def build(name: str) -> Any:
    config = AutoConfig.for_model(name, **{**COMMON, **OTHERS.get(name, {})})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).double().eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
    return model


@pytest.fixture
def make_other() -> Callable[[str], Any]:
    """`make_other("mamba")`."""
    return build


@pytest.fixture
def bush() -> Any:
    """A tree with two branches of different depth, and a fork."""
    return BUSH


class Text:
    """A prompt on a route, and the same prompt decoded plainly.

    Args:
        model: Not wrapped.
        route: The route.
        length: Of the prompt.
    """

    def __init__(self, model: Any, route: type[Route], length: int = 13) -> None:
        self.backbone = Backbone(model)
        self.backbone.take(route)
        ids = torch.randint(2, 128, (1, length + BUSH.size), generator=torch.Generator().manual_seed(length))
        prompt, self.tokens = ids[:, : -BUSH.size], ids[:, -BUSH.size :]
        self.cache, self.plain = self.backbone.new_cache(), TextState(self.backbone)
        self.backbone.read(prompt, self.cache, last_only=True)
        self.cache.seal(32)
        self.plain.read(prompt, last_only=True)

    def tree(self, **wanted: Any) -> torch.Tensor:
        """Logits [N, V] at the nodes of the bush, by the route."""
        self.cache.make_room(BUSH.size)
        tree_pass = TreePass(shape=BUSH, cache=self.cache, device=self.backbone.device)
        return self.backbone.verify(self.tokens, tree_pass, **wanted).logits[0]

    def expected(self) -> torch.Tensor:
        """The same by plain decoding of each path."""
        return NodesRoute(self.backbone).verify_text(self.plain, self.tokens[0], BUSH)[0].logits[0]

    def keep(self, path: Sequence[int]) -> None:
        """Makes a path part of the text, in both."""
        self.cache.keep(0, path)
        for node in path:
            self.plain.read(self.tokens[:, node : node + 1])


@pytest.fixture
def text() -> type[Text]:
    """The class of prompts on a route."""
    return Text
