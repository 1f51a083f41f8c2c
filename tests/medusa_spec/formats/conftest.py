"""Foreign checkpoints of random tensors for a tiny target."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from medusa_spec import MedusaModel
from medusa_spec.backbone import Backbone
from medusa_spec.checkpoint import load_heads
from medusa_spec.drafters.base import ReadStates
from medusa_spec.formats.contents import Contents
from medusa_spec.heads import DraftHeads, HeadsConfig, make_heads
from medusa_spec.testing import tiny

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def target() -> Backbone:
    """A tiny Llama: H 32, V 128, float64."""
    return Backbone(tiny("llama"))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same Llama in a folder."""
    folder = tmp_path_factory.mktemp("base")
    tiny("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def randoms() -> Callable[..., Tensors]:
    """`randoms({name: shape})`: random float64 tensors, small enough for SiLU to bend."""

    def make(shapes: dict[str, tuple[int, ...]]) -> Tensors:
        return {name: torch.randn(shape, dtype=torch.float64) * 0.2 for name, shape in shapes.items()}

    return make


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """`write(tensors, config, file=…)`: a folder with these; files ending in .pt or .bin are pickles."""

    def make(tensors: Tensors, config: dict[str, Any] | None = None, *, file: str = "heads.safetensors") -> Path:
        folder = tmp_path / "foreign"
        folder.mkdir(exist_ok=True)
        if file.endswith(".safetensors"):
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
        else:
            torch.save(tensors, folder / file)
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture
def load(target: Backbone) -> Callable[[Path], DraftHeads]:
    """`load(folder)`: the heads, loaded for the target."""
    return lambda folder: load_heads(folder, target)[0]


@pytest.fixture
def random_heads(target: Backbone) -> Callable[..., DraftHeads]:
    """`random_heads("medusa", draft=…, of=backbone, **config)`: heads of a family with random weights, float64."""

    def make(
        kind: str = "medusa", *, draft: torch.Tensor | None = None, of: Backbone = target, **config: Any
    ) -> DraftHeads:
        sizes = HeadsConfig(
            hidden_size=of.hidden_size,
            vocab_size=of.vocab_size,
            kind=kind,
            draft_vocab_size=None if draft is None else len(draft),
            **{"num_heads": 3, **config},
        )
        heads = make_heads(sizes, of.projection().rows(draft), draft, of.embedding()).double()
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        return heads.requires_grad_(False).eval()

    return make


@pytest.fixture
def names() -> Callable[..., Contents]:
    """`names(*names, **config)`: a checkpoint of which only the names are known."""

    def make(*names: str, **config: Any) -> Contents:
        return Contents(folder=Path("there"), files={name: [Path("there/file")] for name in names}, config=config)

    return make


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of eight layers, whose hidden states EAGLE-3 reads, in a folder."""
    folder = tmp_path_factory.mktemp("deep")
    tiny("llama", num_hidden_layers=8).save_pretrained(folder)
    return folder


@pytest.fixture
def draft_by_hand() -> Callable[..., list[torch.Tensor]]:
    """`draft_by_hand(tensors, prefix, text, step, steps, heads=…, kv_heads=…, …)`: features of one draft.

    A causal decoder layer over `text` rows, each a pair of residual stream and what attention reads; then `step(k,
    feature)` gives the pair of the next row. What the layer returns for the last row of each pass.
    """

    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight

    def layer(tensors, prefix, rows, heads, kv_heads, theta, eps, stretch):
        x, entered = (torch.stack(parts) for parts in zip(*rows, strict=True))

        def product(name: str, x: torch.Tensor) -> torch.Tensor:
            return x @ tensors[f"{prefix}{name}_proj.weight"].T + tensors.get(f"{prefix}{name}_proj.bias", 0.0)

        def turned(x: torch.Tensor) -> torch.Tensor:  # pairs (i, i + D / 2) as complex numbers
            half = x.shape[-1] // 2
            rates = torch.tensor([stretch(theta ** (-i / half)) for i in range(half)], dtype=torch.float64)
            angles = torch.arange(len(x)).double()[:, None] * rates
            pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
            return torch.cat([pairs.real, pairs.imag], dim=-1)

        query, key, value = (
            product(f"self_attn.{name}", entered).view(len(rows), count, -1)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        query, key, outs = turned(query), turned(key), []
        for head in range(heads):
            own = head // (heads // kv_heads)
            scores = query[:, head] @ key[:, own].T / query.shape[-1] ** 0.5
            scores += torch.full_like(scores, float("-inf")).triu(1)
            outs.append(scores.softmax(-1) @ value[:, own])
        x = x + product("self_attn.o", torch.cat(outs, dim=-1))
        read = norm(x, tensors[f"{prefix}post_attention_layernorm.weight"], eps)
        gate, up = product("mlp.gate", read), product("mlp.up", read)
        return x + product("mlp.down", gate * gate.sigmoid() * up)

    def draft(tensors, prefix, text, step, steps, *, heads, kv_heads, theta=10_000.0, eps=1e-6, stretch=float):
        rows, features = list(text), []
        for k in range(steps):
            features.append(layer(tensors, prefix, rows, heads, kv_heads, theta, eps, stretch)[-1])
            if k + 1 < steps:
                rows.append(step(k + 1, features[-1]))
        return features

    draft.norm = norm
    return draft


@pytest.fixture
def chain() -> Callable[..., list[int]]:
    """`chain(model, ids)`: what heads that attend draft behind a text whose last token is the root."""

    def draft(model: MedusaModel, ids: torch.Tensor) -> list[int]:
        states = model.backbone.states(ids[None], taps=model.heads.taps)
        session, text = model.drafter.begin([]), ids.tolist()
        for part in (slice(0, 3), slice(3, len(text) - 1)):  # what is read may come in parts
            layers = None if states.layers is None else states.layers[0, part]
            session.read(text[part], ReadStates(h=states.h[0, part], layers=layers))
        return list(session.draft(text[-1], None, None).tokens[1:])

    return draft


@pytest.fixture
def decodes(base: Path) -> Callable[[Path], MedusaModel]:
    """`decodes(folder)`: loads base and heads by the public call, and sees that the output is the target's."""

    def check(folder: Path, base: Path = base, **arguments: Any) -> MedusaModel:
        model = MedusaModel.from_pretrained(base, heads=folder, **arguments)
        ids = torch.tensor([[5, 17, 80, 3, 99, 41]])
        drafted = model.generate(ids, do_sample=False, max_new_tokens=12)
        assert torch.equal(drafted, model.generate(ids, do_sample=False, max_new_tokens=12, draft_nodes=0))
        return model

    return check
