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
from medusa_spec.formats.contents import Contents
from medusa_spec.heads import DraftHeads
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
def names() -> Callable[..., Contents]:
    """`names(*names, **config)`: a checkpoint of which only the names are known."""

    def make(*names: str, **config: Any) -> Contents:
        return Contents(folder=Path("there"), files={name: [Path("there/file")] for name in names}, config=config)

    return make


@pytest.fixture
def decodes(base: Path) -> Callable[[Path], MedusaModel]:
    """`decodes(folder)`: loads base and heads by the public call, and sees that the output is the target's."""

    def check(folder: Path) -> MedusaModel:
        model = MedusaModel.from_pretrained(base, heads=folder)
        ids = torch.tensor([[5, 17, 80, 3, 99, 41]])
        drafted = model.generate(ids, do_sample=False, max_new_tokens=12)
        assert torch.equal(drafted, model.generate(ids, do_sample=False, max_new_tokens=12, draft_nodes=0))
        return model

    return check
