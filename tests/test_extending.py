"""docs/extending.md is true: its family, its lines and its test do what the page says."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from medusa_spec import MedusaModel
from medusa_spec.backbone import Backbone
from medusa_spec.finetune import FinetuneConfig, config_checks
from medusa_spec.finetune.store import make_targets
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.heads import LEVELS, HeadsConfig, Projection, TokenEmbedding, families, make_heads
from medusa_spec.heads import config as heads_config
from medusa_spec.heads.sizes import LayerSizes
from medusa_spec.testing import tiny_model
from medusa_spec.tree import chain_template

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
PYTHON = {body.split("\n", 1)[0].removeprefix("# "): body for language, body in BLOCKS if language == "python"}
(DIFF,) = [body for language, body in BLOCKS if language == "diff"]


def run(path: str, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A file of the page as a module."""
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(PYTHON[path], f"docs/extending.md: {path}", "exec"), vars(module))
    return module


@pytest.fixture
def nudge(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The family of the page, with its lines in the tables."""
    module = run("heads/nudge.py", "medusa_spec.heads.nudge", monkeypatch)
    (line,) = re.findall(r"^\+(KINDS = .*)$", DIFF, re.MULTILINE)
    kinds: dict[str, tuple[str, ...]] = {}
    exec(line, kinds)
    for place in (heads_config, config_checks):
        monkeypatch.setattr(place, "KINDS", kinds["KINDS"])
    heads, levels = re.findall(r'^\+    "nudge": (\w+),$', DIFF, re.MULTILINE)
    monkeypatch.setitem(families.FAMILIES, "nudge", getattr(module, heads))
    monkeypatch.setitem(LEVELS, "nudge", getattr(module, levels))
    return module


def test_the_lines_to_change_are_there() -> None:
    files = re.split(r"^ # (\S+\.py)\n", DIFF, flags=re.MULTILINE)[1:]
    assert files[::2] == ["heads/config.py", "heads/families.py", "medusa_spec/cli/finetune_app.py"]
    for path, lines in zip(files[::2], files[1::2], strict=True):
        text = (ROOT / path).read_text(encoding="utf-8")
        there = [line[1:] for line in lines.splitlines() if line[0] in " -"]
        assert there and all(f"\n{line}\n" in text for line in there)


def test_the_pages_own_test_passes(nudge: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    laws = {
        k: law for k, law in vars(run("tests/heads/test_nudge.py", "test_nudge", monkeypatch)).items() if "test_" in k
    }
    assert len(laws) == 2
    for law in laws.values():
        law()


@pytest.mark.parametrize("options", [{}, {"tied": True, "bias": True}])
def test_the_new_family_trains_and_drafts(nudge: ModuleType, options: dict[str, bool]) -> None:
    target = tiny_model(dtype=torch.float64)
    prompt = torch.randint(5, 90, (1, 12))
    text = target.generate(prompt, do_sample=False, max_new_tokens=40)
    backbone = Backbone(target)
    settings = FinetuneConfig(
        model="m", data=("d",), output="o", kind="nudge", num_heads=2, options=options, draft_vocab_size=None
    )
    config = settings.heads_config(hidden_size=backbone.hidden_size, vocab_size=backbone.vocab_size)
    heads = make_heads(config, backbone.projection(), None, backbone.embedding()).double()
    assert isinstance(heads, nudge.NudgeHeads) and len(heads.heads) == (1 if options else 2)
    model = TrainedHeads(heads, depth_decay=1.0).double()
    h, targets = backbone.hidden_states(text)[0], make_targets(text[0].int(), torch.ones(text.shape[1]).bool(), 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    losses = []
    for _ in range(100):
        loss = model(h, targets)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    backbone.detach()
    decoder = MedusaModel(target, heads, tree=chain_template(2), probe=False)
    assert torch.equal(decoder.generate(prompt, do_sample=False, max_new_tokens=40), text)
    assert decoder.last_stats.accepted > 0


def test_the_new_familys_levels_give_the_modules_logits(nudge: ModuleType) -> None:
    config = HeadsConfig(hidden_size=8, vocab_size=20, kind="nudge", num_heads=2, options={"bias": True})
    embedding = TokenEmbedding(weight=torch.randn(20, 8))
    heads = make_heads(config, Projection(weight=torch.randn(20, 8)), None, embedding)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    levels = LEVELS["nudge"](heads, dtype=torch.float32, device=torch.device("cpu"))
    h, path = torch.randn(8), torch.tensor([3, 11])
    root = levels.start(h[None], path[:1])
    torch.testing.assert_close(levels.logits(0, root)[0], heads(h, path)[0])
    torch.testing.assert_close(levels.logits(1, levels.descend(1, root, path[1:]))[0], heads(h, path)[1])


def test_the_files_that_the_page_names_exist() -> None:
    text = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`((?:[\w-]+/)+\w+\.py)`", text))
    assert len(named) > 5 and [name for name in named if not (ROOT / name).is_file()] == []


def test_every_family_and_its_options_stand_in_the_pages_table() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", PAGE, re.MULTILINE))
    (sizes,) = re.findall(r"^\*Layer\* stands for .*?:\n(.*?)\.$", PAGE, re.MULTILINE | re.DOTALL)
    layer = re.findall(r"`(\w+)`", sizes)
    assert layer == list(LayerSizes.__dataclass_fields__)
    for kind, family in families.FAMILIES.items():
        options = list(family.Options.__dataclass_fields__)
        assert rows[kind].strip().startswith("layer") == issubclass(family.Options, LayerSizes)
        assert (layer if "layer" in rows[kind] else []) + re.findall(r"`(\w+)`", rows[kind]) == options
