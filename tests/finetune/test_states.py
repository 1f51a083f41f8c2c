"""The states stage."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data import run_data
from medusa_spec.finetune.states import plan_shards, run_states
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.tokens import TokenData

MakeConfig = Callable[..., FinetuneConfig]


class Stop(Exception):
    """A kill that a test can catch."""


class StoppingTarget:
    """A target whose backbone stops after some passes."""

    def __init__(self, config: FinetuneConfig, passes: int) -> None:
        self.real, self.left = Target(config).backbone, passes
        self.hidden_size, self.device, self.backbone = self.real.hidden_size, self.real.device, self

    def hidden_states(self, input_ids: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise Stop
        return self.real.hidden_states(input_ids, attention_mask)


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
    data, store = TokenData(Path(config.output) / "data", "train"), StateStore(Path(config.output) / "states", "train")
    assert len(store.h) > 2 and len(store) > 1000
    row = 0
    for number in store.conversations[0].unique_consecutive()[:6].tolist():
        conversation = data[number]
        mask = conversation.mask.tolist()
        wanted = [t for t in range(len(mask)) if any(mask[t + 2 : t + 2 + config.num_heads])]
        alone = target.backbone.hidden_states(conversation.input_ids[None].long())[0, wanted]
        part = store.rows(torch.arange(row, row + len(wanted)))
        torch.testing.assert_close(part.h.float(), alone, rtol=2**-7, atol=1e-2)
        assert part.targets[0, 1:].ge(0).any()
        row += len(wanted)


def test_stored_states_choose_what_the_target_chooses_next(config: FinetuneConfig) -> None:
    """The alignment: the LM head on a row's h is the target's guess of column 0, the token after it."""
    target = Target(config)
    run_states(config, target)
    store = StateStore(Path(config.output) / "states", "train")
    data = TokenData(Path(config.output) / "data", "train")
    conversation = data[int(store.conversations[0][0])]
    logits = target.model(conversation.input_ids[None].long()).logits[0]
    rows = store.rows(torch.arange(int((store.conversations[0] == store.conversations[0][0]).sum())))
    positions = [t for t in range(len(conversation.mask)) if conversation.mask[t + 2 : t + 2 + config.num_heads].any()]
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
