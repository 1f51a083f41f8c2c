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
from medusa_spec.checkpoint import load_heads, read_config, save_heads
from medusa_spec.config import MedusaConfig
from medusa_spec.errors import ConfigError
from medusa_spec.finetune import FinetuneConfig, run_pipeline
from medusa_spec.finetune.batches import TextBatches, in_order
from medusa_spec.finetune.store import StateStore, make_targets
from medusa_spec.finetune.target import Target, decoder_config
from medusa_spec.finetune.tokens import TokenData
from medusa_spec.finetune.train import load_trained, start_heads
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.heads import FAMILIES as heads_of
from medusa_spec.heads import HeadsConfig, fitted_options, make_heads
from medusa_spec.testing import tiny_model
from medusa_spec.tree import Growth, chain_template

MakeConfig = Callable[..., FinetuneConfig]
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("hydra", {}),
    ("mlp_speculator", {}),
    ("mlp_speculator", {"tied": True, "inner_size": 24}),
    ("recurrent", {}),
    ("recurrent", {"tied": False, "inner_size": 24}),
]
ATTENDING: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {}),
    ("eagle", {"tied": False}),
    ("eagle3", {}),
    ("eagle3", {"tied": False, "taps": "1", "from_h": False}),
    ("fused", {"taps": "0,1"}),
]


def run(finished: FinetuneConfig, folder: Path, **changes: Any) -> FinetuneConfig:
    """Trains and calibrates on the states that a finished run has read, or on whole texts for heads that attend."""
    folder.mkdir()
    config = replace(finished, output=str(folder), **({"learning_rate": 0.01, "epochs": 4} | changes))
    attends = heads_of[config.kind].attends
    for name in ("data*", *([] if attends else ["states*"])):
        for path in Path(finished.output).glob(name):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
    run_pipeline(config, stages=("states", "train", "calibrate") if attends else ("train", "calibrate"))
    return config


@pytest.mark.parametrize(("kind", "options"), [*FAMILIES, *ATTENDING])
def test_losses_fall_and_the_decoder_says_what_plain_greedy_says(
    kind: str, options: dict[str, Any], finished: FinetuneConfig, tmp_path: Path
) -> None:
    config = run(finished, tmp_path / "run", kind=kind, options=options)
    history = json.loads((tmp_path / "run" / "train" / "history.json").read_text())
    for k in range(3):
        losses = [entry[f"loss_head_{k}"] for entry in history if f"loss_head_{k}" in entry]
        assert losses[-1] < 0.9 * losses[0], k
    saved = read_config(tmp_path / "run" / "heads").heads
    fitted = fitted_options(kind, options, decoder_config(config))
    assert saved.kind == kind and saved.options == fitted and options.items() <= fitted.items()
    assert config.tree_size == 7
    target = tiny_model(dtype=torch.float64)
    model = MedusaModel(target, tmp_path / "run" / "heads", probe=False)
    prompt = torch.randint(5, 90, (1, 12))
    expected = target.generate(prompt, do_sample=False, max_new_tokens=60)
    assert torch.equal(model.generate(prompt, do_sample=False, max_new_tokens=60), expected)
    assert max(model.last_stats.pass_sizes) == 8


@pytest.mark.parametrize(("kind", "options"), [*FAMILIES, *ATTENDING])
def test_what_was_learnt_by_heart_is_accepted_in_the_decoder(kind: str, options: dict[str, Any]) -> None:
    """h, tokens and depths are the same in training and in drafting: else accuracy would not become acceptance."""
    target = tiny_model(dtype=torch.float64)
    prompt = torch.randint(5, 90, (1, 12))
    text = target.generate(prompt, do_sample=False, max_new_tokens=60)
    backbone = Backbone(target)
    config = HeadsConfig(
        hidden_size=backbone.hidden_size,
        vocab_size=backbone.vocab_size,
        kind=kind,
        num_heads=3,
        options=fitted_options(kind, options, backbone.config),
    )
    heads = make_heads(config, backbone.projection(), None, backbone.embedding()).double()
    states = backbone.states(text, taps=heads.taps)
    targets = make_targets(text[0].int(), torch.ones(text.shape[1]).bool(), 3)[None]
    model = TrainedHeads(heads, depth_decay=1.0).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)  # at 0.01 some blow up, by chance
    for _ in range(200):
        loss = model(states.h, targets, layers=states.layers)["loss"]
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
    with pytest.raises(ConfigError, match=r"options must be that of init_from .*inner_size=24.* got .*=None"):
        start_heads(replace(given, options={}), target.backbone, counts, target.eos_ids)


def test_other_options_are_another_training(finished: FinetuneConfig, tmp_path: Path) -> None:
    config = run(finished, tmp_path / "run", kind="recurrent")
    with pytest.raises(ConfigError, match=r"'train'.*options was None, is \{'tied': False\}"):
        run_pipeline(replace(config, options={"tied": False}), stages=("train",))


def test_steps_that_were_not_trained_go_on_as_the_trained_ones(finished: FinetuneConfig, tmp_path: Path) -> None:
    config = run(finished, tmp_path / "run", kind="eagle", unroll=1, feature_weight=0.5, num_heads=3)
    history = json.loads((tmp_path / "run" / "train" / "history.json").read_text())
    trained = {name for entry in history for name in entry if name.startswith("loss_head_")}
    assert trained == {"loss_head_0"}
    measured = {name for entry in history for name in entry if name.startswith("top1_head_")}
    assert measured == {f"top1_head_{k}" for k in range(3)}  # a draft takes them all
    saved = read_config(tmp_path / "run" / "heads")
    assert saved.heads.num_heads == 3 and saved.training["recipe"]["unroll"] == 1 and config.feature_weight == 0.5
    assert saved.values is not None and saved.values.depth == 3


def test_a_nearer_feature_is_what_its_weight_buys(finished: FinetuneConfig, tmp_path: Path) -> None:
    distances = []
    for weight in (0.0, 20.0):
        config = run(finished, tmp_path / f"run{weight}", kind="eagle", feature_weight=weight)
        heads = load_trained(config, Target(config).backbone)
        store = StateStore(Path(config.output), "held_out", 3)
        model = TrainedHeads(heads, depth_decay=1.0, feature_weight=1.0)
        plain = TrainedHeads(heads, depth_decay=1.0)
        gaps = [float(model(**batch)["loss"] - plain(**batch)["loss"]) for batch in in_order(store, attends=True)]
        distances.append(sum(gaps))
    assert distances[1] < 0.9 * distances[0]


@pytest.mark.parametrize(("kind", "options"), [("eagle", {"tied": False}), ("eagle3", {})])
def test_a_killed_and_resumed_training_on_texts_gives_the_same_bits(
    kind: str, options: dict[str, Any], finished: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"kind": kind, "options": options, "epochs": 1, "batch_positions": 2000, "save_steps": 3}
    whole = run(finished, tmp_path / "whole", **settings)
    stopped = replace(whole, output=str(tmp_path / "stopped"))
    Path(stopped.output).mkdir()
    for name in ("data*", "states*"):
        for path in Path(whole.output).glob(name):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, Path(stopped.output) / path.name)
    read = TextBatches.__getitem__

    def stop(self: TextBatches, step: int) -> dict[str, torch.Tensor]:
        if step == 7:
            raise KeyboardInterrupt
        return read(self, step)

    monkeypatch.setattr(TextBatches, "__getitem__", stop)
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(stopped, stages=("train",))
    monkeypatch.setattr(TextBatches, "__getitem__", read)
    assert (tmp_path / "stopped" / "train" / "checkpoint-6" / "complete").exists()
    assert not (tmp_path / "stopped" / "train.done.json").exists()
    run_pipeline(stopped, stages=("train", "calibrate"))
    for name in ("train/heads.safetensors", "heads/heads.safetensors"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(("kind", "options"), [("medusa", {}), *FAMILIES, *ATTENDING])
def test_training_leaves_the_target_as_it_is(
    kind: str, options: dict[str, Any], finished: FinetuneConfig, tmp_path: Path
) -> None:
    config = replace(finished, output=str(tmp_path / "run"), kind=kind, options=options, epochs=1)
    target = Target(config)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    run_pipeline(config, stages=("data", "states", "train", "calibrate"), target=target)
    after = target.release().state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())


@pytest.mark.parametrize(("kind", "options"), ATTENDING)
@pytest.mark.parametrize("lm_head", ["shared", "own"])
def test_saved_heads_come_back_bit_for_bit(
    kind: str, options: dict[str, Any], lm_head: Any, finished: FinetuneConfig, tmp_path: Path
) -> None:
    backbone = Target(finished).backbone
    config = HeadsConfig(
        hidden_size=backbone.hidden_size,
        vocab_size=backbone.vocab_size,
        kind=kind,
        num_heads=3,
        lm_head=lm_head,
        options=fitted_options(kind, options, backbone.config),
    )
    heads = make_heads(config, backbone.projection(), None, backbone.embedding())
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    growth = Growth(token_seconds=0.01, level_seconds=0.001, pass_seconds=((1, 0.02), (8, 0.021)))
    save_heads(tmp_path, heads, MedusaConfig(heads=config, growth=growth), dtype=torch.float32)
    loaded, read = load_heads(tmp_path, backbone)
    assert read.heads == config and read.growth == growth
    state, back = heads.state_dict(), loaded.state_dict()
    assert state.keys() == back.keys() and all(torch.equal(state[name], back[name]) for name in state)
    ids = torch.randint(3, 99, (1, 9))
    states = backbone.states(ids, taps=heads.taps)
    tokens = torch.randint(3, 99, (1, 9, 3))
    extra = {} if states.layers is None else {"layers": states.layers}
    assert torch.equal(heads(states.h, tokens, **extra), loaded(states.h, tokens, **extra))


def test_heads_that_were_saved_with_rules_of_growth_grow_trees(finished: FinetuneConfig, tmp_path: Path) -> None:
    config = run(finished, tmp_path / "run", kind="eagle", epochs=1)
    saved = read_config(tmp_path / "run" / "heads")
    growth = Growth(token_seconds=1.0, level_seconds=0.0, pass_seconds=((1, 1.0), (15, 1.0)), hit=1.0)
    heads = load_trained(config, Target(config).backbone)
    save_heads(tmp_path / "grown", heads, replace(saved, growth=growth))
    target = Target(config).model
    prompt = torch.arange(3, 15)[None]
    for tree, largest in ((None, 15), (chain_template(2), 3)):  # a tree that is asked for goes before the rules
        model = MedusaModel(target, tmp_path / "grown", tree=tree, probe=False)
        model.generate(prompt, do_sample=False, max_new_tokens=20)
        assert max(model.last_stats.pass_sizes) == largest
        model.detach()
