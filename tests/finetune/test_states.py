"""The states stage."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_spec.backbone import TargetStates
from medusa_spec.errors import ConfigError
from medusa_spec.files import read_json, write_json
from medusa_spec.finetune import stages
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data import run_data
from medusa_spec.finetune.states import ShardPlan, padding, plan_shards, run_states
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.tokens import TokenData
from medusa_spec.testing import save_tiny_model

MakeConfig = Callable[..., FinetuneConfig]


class Stop(Exception):
    """A kill that a test can catch."""


class StoppingTarget:
    """A target whose backbone stops after some passes."""

    def __init__(self, config: FinetuneConfig, passes: int) -> None:
        self.real, self.left = Target(config).backbone, passes
        self.hidden_size, self.device, self.backbone = self.real.hidden_size, self.real.device, self
        self.config = self.real.config

    def states(self, input_ids: torch.Tensor, attention_mask: Any = None, *, taps: Any = ()) -> TargetStates:
        self.left -= 1
        if self.left < 0:
            raise Stop
        return self.real.states(input_ids, attention_mask, taps=taps)


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path) -> FinetuneConfig:
    """A run whose data stage is done."""
    config = make_config(tmp_path / "run")
    run_data(config, Target(config))
    return config


def shards(config: FinetuneConfig) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (Path(config.output) / "states").iterdir()}


def copied(config: FinetuneConfig, name: str) -> FinetuneConfig:
    output = Path(config.output).with_name(name)
    shutil.copytree(config.output, output)
    return replace(config, output=str(output))


@pytest.mark.parametrize("passes", [0, 1, 5, 9])
def test_a_stopped_and_resumed_run_gives_the_same_bits(config: FinetuneConfig, passes: int) -> None:
    stopped = copied(config, "stopped")
    run_states(config, Target(config))
    with pytest.raises(Stop):
        run_states(stopped, StoppingTarget(stopped, passes))
    assert all(shards(stopped)[name] == shards(config)[name] for name in shards(stopped))
    before = len(shards(stopped))
    run_states(stopped, Target(stopped))
    assert shards(stopped) == shards(config) and before < len(shards(config))


def test_two_processes_from_both_ends_give_the_same_bits(config: FinetuneConfig) -> None:
    other = copied(config, "other")
    run_states(config, Target(config))
    with pytest.raises(Stop):
        run_states(other, StoppingTarget(other, 6))
    run_states(replace(other, reverse=True), Target(other))
    assert shards(other) == shards(config)


def test_stored_states_are_those_of_single_passes(config: FinetuneConfig) -> None:
    target = Target(config)
    run_states(config, target)
    data, store = TokenData(Path(config.output) / "data", "train"), StateStore(Path(config.output), "train", 3)
    assert len(store.h) > 2 and len(store) > 1000 and not store.layers
    row = 0
    for number in store.conversations[0].unique_consecutive()[:6].tolist():
        conversation = data[number]
        mask = conversation.mask.tolist()
        wanted = [t for t in range(len(mask) - 1) if mask[t + 1]]
        alone = target.backbone.hidden_states(conversation.input_ids[None].long())[0, wanted]
        part = store.rows(torch.arange(row, row + len(wanted)))
        torch.testing.assert_close(part.h.float(), alone, rtol=2**-7, atol=1e-2)
        assert part.targets[:, 0].ge(0).all()
        row += len(wanted)


@pytest.mark.parametrize(
    ("kind", "options", "taps"), [("eagle", {}, ()), ("eagle3", {}, (0, 1)), ("eagle3", {"taps": "1"}, (1,))]
)
def test_families_that_attend_get_whole_texts_and_the_layers_that_they_tap(
    config: FinetuneConfig, kind: str, options: dict[str, Any], taps: tuple[int, ...]
) -> None:
    config = replace(config, kind=kind, options=options)
    target = Target(config)
    manifest = run_states(config, target)
    assert manifest["whole"] is True and tuple(manifest["taps"]) == taps
    data, store = TokenData(Path(config.output) / "data", "train"), StateStore(Path(config.output), "train", 3)
    assert len(store) == sum(int(part.mask.nonzero()[-1]) for part in data) and store.taps == taps
    for text in store.texts()[::40]:
        conversation = data[int(store.conversations[text.shard][text.start])]
        outputs = target.model(conversation.input_ids[None].long(), output_hidden_states=True)
        batch = store.batch([text])
        kept = slice(0, text.length)
        h = target.backbone.hidden_states(conversation.input_ids[None].long())
        torch.testing.assert_close(batch["h"].float(), h[:, kept], rtol=2**-7, atol=1e-2)
        for place, tap in enumerate(taps):
            layer = outputs.hidden_states[tap][:, kept]
            torch.testing.assert_close(batch["layers"][:, :, place].float(), layer, rtol=2**-7, atol=1e-2)


def test_a_stopped_and_resumed_run_over_whole_texts_gives_the_same_bits(config: FinetuneConfig) -> None:
    config = replace(config, kind="eagle3")
    stopped = copied(config, "stopped")
    run_states(config, Target(config))
    with pytest.raises(Stop):
        run_states(stopped, StoppingTarget(stopped, 9))
    before = len(shards(stopped))
    run_states(stopped, Target(stopped))
    assert shards(stopped) == shards(config) and 0 < before < len(shards(config))


def test_states_of_another_form_are_not_taken_for_those_wanted(config: FinetuneConfig) -> None:
    run_states(config, Target(config))
    with pytest.raises(ConfigError, match="'states'.*whole was False, is True"):
        run_states(replace(config, kind="eagle"), Target(config))
    whole = copied(config, "whole")
    stages.forget(Path(whole.output), "states")
    run_states(replace(whole, kind="eagle"), Target(whole))
    with pytest.raises(ConfigError, match=r"'states'.*taps was \[\], is \[0, 1\]"):
        run_states(replace(whole, kind="eagle3"), Target(whole))


def test_stored_states_choose_what_the_target_chooses_next(config: FinetuneConfig) -> None:
    """The alignment: the LM head on a row's h is the target's guess of column 0, the token after it."""
    target = Target(config)
    run_states(config, target)
    store = StateStore(Path(config.output), "train", 3)
    data = TokenData(Path(config.output) / "data", "train")
    conversation = data[int(store.conversations[0][0])]
    logits = target.model(conversation.input_ids[None].long()).logits[0]
    rows = store.rows(torch.arange(int((store.conversations[0] == store.conversations[0][0]).sum())))
    positions = [t for t in range(len(conversation.mask) - 1) if conversation.mask[t + 1]]
    guesses = target.backbone.lm_head(rows.h.float())
    agree = (guesses.argmax(-1) == logits[positions].argmax(-1)).float().mean()
    assert agree > 0.9  # bfloat16 may tip near ties


def test_batches_stay_within_their_budget_and_hold_everything_once(config: FinetuneConfig) -> None:
    data = TokenData(Path(config.output) / "data", "train")
    plans = plan_shards(data, config)
    lengths = data.lengths()
    batches = [batch for plan in plans for batch in plan.batches]
    assert sorted(number for batch in batches for number in batch) == list(range(len(data)))
    assert all(len(b) * max(lengths[n] for n in b) <= max(config.batch_tokens, lengths[b[0]]) for b in batches)
    assert all(plan.positions >= config.shard_positions for plan in plans[:-1])


def test_weights_exchanged_under_the_same_name_are_noticed(
    make_config: MakeConfig, tiny_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_folder, tmp_path / "model")
    config = make_config(tmp_path / "run", model=str(tmp_path / "model"))
    run_data(config, Target(config))
    run_states(config, Target(config))
    old = copied(config, "old")
    path = Path(old.output) / "states.done.json"
    record = read_json(path)
    del record["settings"]["weights"]
    write_json(path, record)
    save_tiny_model(config.model, seed=1, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"'states'.*weights was '\w+', is '\w+'"):
        run_states(config, Target(config))
    run_states(old, Target(old))  # a run of an older version goes on
    other = replace(config, output=str(tmp_path / "other"), states_from=config.output)
    run_data(other, Target(other))
    with pytest.raises(ConfigError, match="states_from must be a run with weights"):
        run_states(other, Target(other))


def test_padding_is_the_share_of_tokens_that_fill_up_shorter_rows(config: FinetuneConfig) -> None:
    plans = [ShardPlan(batches=((0, 1), (2,)), positions=0), ShardPlan(batches=((3, 4),), positions=0)]
    assert padding([10, 8, 7, 6, 3], plans) == pytest.approx(1 - 34 / (20 + 7 + 12))
    found = run_states(config, Target(config))["padding"]
    assert set(found) == {"train", "held_out"} and all(0 <= share < 0.2 for share in found.values())
