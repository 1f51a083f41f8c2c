"""MTP heads train through the whole pipeline: the target's own layer in, heads out that decode exactly."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_spec import MedusaModel
from medusa_spec.checkpoint import read_config
from medusa_spec.errors import ConfigError
from medusa_spec.finetune import FinetuneConfig, run_pipeline
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.tokens import TokenData
from medusa_spec.finetune.train import start_heads
from medusa_spec.testing import tiny, tiny_model
from medusa_spec.tree import chain_template

STAGES = ("data", "states", "train", "calibrate")


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
def trained(
    request: pytest.FixtureRequest,
    make_config: Callable[..., FinetuneConfig],
    tmp_path_factory: pytest.TempPathFactory,
) -> FinetuneConfig:
    """The settings of a finished run."""
    options: dict[str, Any] = {} if request.param else {"tied": False}
    folder = tmp_path_factory.mktemp("mtp") / "run"
    config = make_config(folder, kind="mtp", options=options, learning_rate=0.01, epochs=2, batch_tokens=2048)
    run_pipeline(config, stages=STAGES)
    return config


def test_losses_fall_and_the_decoder_says_what_plain_greedy_says(trained: FinetuneConfig) -> None:
    folder = Path(trained.output)
    history = json.loads((folder / "train" / "history.json").read_text())
    for k in range(3):
        losses = [entry[f"loss_head_{k}"] for entry in history if f"loss_head_{k}" in entry]
        assert losses[-1] < 0.9 * losses[0], k
    saved = read_config(folder / "heads").heads
    assert saved.kind == "mtp" and saved.options["decoder"]["model_type"] == "llama"
    target = tiny_model(dtype=torch.float64)
    model = MedusaModel(target, folder / "heads", tree=chain_template(3), probe=False)
    prompt = torch.randint(5, 90, (1, 12))
    wanted = {"do_sample": False, "max_new_tokens": 60, "min_new_tokens": 60}
    expected = target.generate(prompt, **wanted)
    assert torch.equal(model.generate(prompt, **wanted), expected)
    assert max(model.last_stats.pass_sizes) == 4


def test_training_on_begins_with_what_was_trained(trained: FinetuneConfig) -> None:
    target = Target(trained)
    counts = TokenData(Path(trained.output) / "data", "train").answer_counts(target.backbone.vocab_size)
    given = replace(trained, init_from=str(Path(trained.output) / "heads"))
    heads = start_heads(given, target.backbone, counts, target.eos_ids)
    fresh = start_heads(trained, target.backbone, counts, target.eos_ids)
    moved = [not torch.equal(one, two) for one, two in zip(heads.parameters(), fresh.parameters(), strict=True)]
    assert all(moved)


def test_a_target_whose_layers_do_not_lend_themselves_is_refused(make_config: Callable[..., FinetuneConfig]) -> None:
    config = make_config(Path("nowhere"), kind="mtp")
    target: Any = Target(config)
    target.__dict__["model"] = tiny("gpt2")
    with pytest.raises(ConfigError, match="kind 'mtp' cannot be trained for this target: GPT2Model has no .*EAGLE"):
        start_heads(config, target.backbone, torch.ones(128), frozenset({2}))
