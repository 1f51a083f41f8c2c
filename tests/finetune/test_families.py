"""Every family trains on stored states, is calibrated, saved and loaded, and leaves the target's output as it is."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_spec import MedusaModel
from medusa_spec.backbone import Backbone
from medusa_spec.checkpoint import read_config
from medusa_spec.errors import ConfigError
from medusa_spec.finetune import FinetuneConfig, run_pipeline
from medusa_spec.finetune.store import make_targets
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.tokens import TokenData
from medusa_spec.finetune.train import start_heads
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.heads import HeadsConfig, make_heads
from medusa_spec.testing import tiny_model
from medusa_spec.tree import chain_template

MakeConfig = Callable[..., FinetuneConfig]
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("hydra", {}),
    ("mlp_speculator", {}),
    ("mlp_speculator", {"tied": True, "inner_size": 24}),
    ("recurrent", {}),
    ("recurrent", {"tied": False, "inner_size": 24}),
]


def run(finished: FinetuneConfig, folder: Path, **changes: Any) -> FinetuneConfig:
    """Trains and calibrates on the states that a finished run has read."""
    folder.mkdir()
    for path in [*Path(finished.output).glob("data*"), *Path(finished.output).glob("states*")]:
        (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
    config = replace(finished, output=str(folder), learning_rate=0.01, epochs=4, **changes)
    run_pipeline(config, stages=("train", "calibrate"))
    return config


@pytest.mark.parametrize(("kind", "options"), FAMILIES)
def test_losses_fall_and_the_decoder_says_what_plain_greedy_says(
    kind: str, options: dict[str, Any], finished: FinetuneConfig, tmp_path: Path
) -> None:
    config = run(finished, tmp_path / "run", kind=kind, options=options)
    history = json.loads((tmp_path / "run" / "train" / "history.json").read_text())
    for k in range(3):
        losses = [entry[f"loss_head_{k}"] for entry in history if f"loss_head_{k}" in entry]
        assert losses[-1] < 0.9 * losses[0], k
    saved = read_config(tmp_path / "run" / "heads").heads
    assert saved.kind == kind and saved.options == options and config.tree_size == 7
    target = tiny_model(dtype=torch.float64)
    model = MedusaModel(target, tmp_path / "run" / "heads", probe=False)
    prompt = torch.randint(5, 90, (1, 12))
    expected = target.generate(prompt, do_sample=False, max_new_tokens=60)
    assert torch.equal(model.generate(prompt, do_sample=False, max_new_tokens=60), expected)
    assert max(model.last_stats.pass_sizes) == 8


@pytest.mark.parametrize(("kind", "options"), FAMILIES)
def test_what_was_learnt_by_heart_is_accepted_in_the_decoder(kind: str, options: dict[str, Any]) -> None:
    """h, tokens and depths are the same in training and in drafting: else accuracy would not become acceptance."""
    target = tiny_model(dtype=torch.float64)
    prompt = torch.randint(5, 90, (1, 12))
    text = target.generate(prompt, do_sample=False, max_new_tokens=60)
    backbone = Backbone(target)
    config = HeadsConfig(
        hidden_size=backbone.hidden_size, vocab_size=backbone.vocab_size, kind=kind, num_heads=3, options=options
    )
    heads = make_heads(config, backbone.projection(), None, backbone.embedding()).double()
    h, targets = backbone.hidden_states(text)[0], make_targets(text[0].int(), torch.ones(text.shape[1]).bool(), 3)
    model = TrainedHeads(heads, depth_decay=1.0).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(150):
        loss = model(h, targets)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    backbone.detach()
    decoder = MedusaModel(target, heads, tree=chain_template(3), probe=False)
    assert torch.equal(decoder.generate(prompt, do_sample=False, max_new_tokens=60), text)
    assert decoder.last_stats.passes < 0.4 * (text.shape[1] - 12)


def test_training_on_keeps_the_options(finished: FinetuneConfig, tmp_path: Path) -> None:
    first = run(finished, tmp_path / "run", kind="recurrent", options={"inner_size": 24})
    given = replace(first, init_from=str(tmp_path / "run" / "heads"))
    target = Target(given)
    counts = TokenData(tmp_path / "run" / "data", "train").answer_counts(target.backbone.vocab_size)
    same = replace(given, options={"inner_size": 24, "tied": True})  # `tied` is the default
    assert start_heads(same, target.backbone, counts, target.eos_ids).options.inner_size == 24
    with pytest.raises(ConfigError, match=r"options must be those of init_from .*inner_size=24.* got .*=None"):
        start_heads(replace(given, options={}), target.backbone, counts, target.eos_ids)


def test_other_options_are_another_training(finished: FinetuneConfig, tmp_path: Path) -> None:
    config = run(finished, tmp_path / "run", kind="recurrent")
    with pytest.raises(ConfigError, match=r"'train'.*options was None, is \{'tied': False\}"):
        run_pipeline(replace(config, options={"tied": False}), stages=("train",))
