"""The teacher stage."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from medusa_spec.errors import ConfigError
from medusa_spec.finetune import FinetuneConfig, run_pipeline, teacher
from medusa_spec.finetune.data import run_data
from medusa_spec.finetune.states import run_states
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.teacher import run_teacher
from medusa_spec.finetune.tokens import TokenData

MakeConfig = Callable[..., FinetuneConfig]


def begun(config: FinetuneConfig) -> Target:
    """The target of a run whose states are read."""
    target = Target(config)
    run_data(config, target)
    run_states(config, target)
    return target


def shards(config: FinetuneConfig) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (Path(config.output) / "teacher").iterdir()}


@pytest.mark.parametrize("kind", ["hydra", "eagle"])
def test_the_teacher_of_a_head_is_what_the_target_says_where_its_token_is_chosen(
    make_config: MakeConfig, tmp_path: Path, kind: str
) -> None:
    config = make_config(tmp_path, kind=kind, loss="kl", top_logits=5)
    target = begun(config)
    result = run_teacher(config, target)
    data, store = TokenData(tmp_path / "data", "train"), StateStore(tmp_path, "train", 3, teacher=True)
    masses = []
    for number in store.conversations[0].unique_consecutive()[:5].tolist():
        conversation = data[number]
        expected = target.model(conversation.input_ids[None].long()).logits[0].softmax(-1)
        rows = (store.conversations[0] == number).nonzero().flatten()
        batch, positions = store.rows(rows).batch(), store.positions[0][rows].tolist()
        for row, position in enumerate(positions):
            for k in range(3):
                place = position + 1 + k
                known = place + 1 < len(conversation.mask) and bool(conversation.mask[place + 1])
                ids, probs = batch["teacher_ids"][row, k].long(), batch["teacher_probs"][row, k]
                assert bool(probs.any()) == known
                if known:
                    torch.testing.assert_close(probs, expected[place].topk(5).values, rtol=2e-2, atol=1e-4)
                    torch.testing.assert_close(probs, expected[place, ids], rtol=2e-2, atol=1e-4)
                    masses.append(float(probs.sum()))
    assert len(masses) > 50
    assert result["kept_mass"]["train"] == pytest.approx(sum(masses) / len(masses), rel=0.2)
    assert 0 < result["kept_mass"]["held_out"] < 1


def test_a_stopped_and_resumed_stage_gives_the_same_bits(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "whole", loss="lk")
    begun(config)
    stopped = replace(config, output=str(tmp_path / "stopped"))
    shutil.copytree(config.output, stopped.output)
    run_teacher(config, Target(config))
    make, left = teacher.make_shard, [2]

    def stop(*args: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        make(*args)

    monkeypatch.setattr(teacher, "make_shard", stop)
    with pytest.raises(KeyboardInterrupt):
        run_teacher(stopped, Target(stopped))
    monkeypatch.setattr(teacher, "make_shard", make)
    before = shards(stopped)
    run_teacher(stopped, Target(stopped))
    assert shards(stopped) == shards(config) and len(before) == 2 < len(shards(config))
    assert all(shards(config)[name] == content for name, content in before.items())


def test_without_logits_to_keep_nothing_is_done(finished: FinetuneConfig) -> None:
    assert run_teacher(finished, Target(finished)) == {}
    assert not (Path(finished.output) / "teacher").exists()
    assert not (Path(finished.output) / "teacher.done.json").exists()


def test_heads_that_first_learnt_tokens_learn_probabilities_from_the_same_states(
    finished: FinetuneConfig, tmp_path: Path
) -> None:
    """The states are not read again, and where a prompt's are not stored no state is asked for."""
    shutil.copytree(finished.output, tmp_path / "run")
    config = replace(finished, output=str(tmp_path / "run"), loss="lk")
    states = (tmp_path / "run" / "states.done.json").stat().st_mtime_ns
    with pytest.raises(ConfigError, match="'train'.*loss was None, is 'lk'"):
        run_pipeline(config)
    run_pipeline(config, stages=("teacher", "train", "calibrate"), redo="teacher")
    assert (tmp_path / "run" / "states.done.json").stat().st_mtime_ns == states


def test_more_tokens_than_the_target_has_are_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path, loss="kl", top_logits=10**6)
    target = begun(config)
    with pytest.raises(ConfigError, match=r"top_logits must be at most \d+, the target's vocabulary, got 1000000"):
        run_teacher(config, target)


def test_another_number_of_tokens_is_another_stage(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path, loss="kl", top_logits=3)
    target = begun(config)
    run_teacher(config, target)
    with pytest.raises(ConfigError, match="'teacher'.*top_logits was 3, is 4"):
        run_teacher(replace(config, top_logits=4), target)
