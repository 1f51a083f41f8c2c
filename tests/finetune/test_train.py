"""The train stage."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from medusa_spec import MedusaModel
from medusa_spec.checkpoint import WEIGHTS_NAME
from medusa_spec.errors import CheckpointError, ConfigError, MedusaError
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.given_heads import check_loaded
from medusa_spec.finetune.stages import read_done
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.tokens import TokenData
from medusa_spec.finetune.train import check_trained, load_trained, run_train, settings, start_heads
from medusa_spec.heads import MedusaHeads

MakeConfig = Callable[..., FinetuneConfig]


def start(config: FinetuneConfig, finished: FinetuneConfig) -> MedusaHeads:
    target = Target(finished)
    counts = TokenData(Path(finished.output) / "data", "train").answer_counts(target.backbone.vocab_size)
    return start_heads(config, target.backbone, counts, target.eos_ids)


def trained_weights(finished: FinetuneConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(finished.output) / "heads" / WEIGHTS_NAME)


def test_training_on_starts_from_the_given_heads(finished: FinetuneConfig) -> None:
    given = replace(finished, init_from=str(Path(finished.output) / "heads"))
    heads, stored = start(given, finished), trained_weights(finished)
    assert all(torch.equal(tensor, stored[name].to(tensor.dtype)) for name, tensor in heads.state_dict().items())
    assert all(p.requires_grad and p.dtype == torch.float32 for p in heads.parameters())


def test_a_second_stage_moves_on_from_the_first(finished: FinetuneConfig, tmp_path: Path) -> None:
    shutil.copytree(finished.output, tmp_path / "run")
    for path in [*(tmp_path / "run").glob("train*"), *(tmp_path / "run").glob("cal*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    config = replace(
        finished, output=str(tmp_path / "run"), init_from=str(Path(finished.output) / "heads"), learning_rate=1e-6
    )
    run_train(config, Target(config))
    moved = load_file(tmp_path / "run" / "train" / WEIGHTS_NAME)
    for name, tensor in trained_weights(finished).items():
        torch.testing.assert_close(moved[name].float(), tensor.float(), atol=1e-3, rtol=0)  # near the first, not zero


def test_heads_of_another_shape_are_refused_with_both_numbers(finished: FinetuneConfig) -> None:
    given = replace(finished, init_from=str(Path(finished.output) / "heads"), num_heads=2)
    with pytest.raises(ConfigError, match=r"num_heads must be that of init_from .* is 3, got 2"):
        start(given, finished)


def test_foreign_heads_are_converted_before_they_are_trained_on(finished: FinetuneConfig, tmp_path: Path) -> None:
    foreign, base = tmp_path / "foreign", finished.model
    foreign.mkdir()
    shapes = {
        f"{k}.0.linear.{part}": shape for k in range(3) for part, shape in (("weight", (32, 32)), ("bias", (32,)))
    }
    torch.save({name: torch.randn(shape) * 0.1 for name, shape in shapes.items()}, foreign / "medusa_lm_head.pt")
    given = replace(finished, init_from=str(foreign))
    with pytest.raises(ConfigError, match=r"own format, got .*foreign.* convert them once: MedusaModel\.from_pre"):
        start(given, finished)
    MedusaModel.from_pretrained(base, heads=foreign).save_pretrained(tmp_path / "ours")
    heads = start(replace(finished, init_from=str(tmp_path / "ours"), draft_vocab_size=None), finished)
    stored = torch.load(foreign / "medusa_lm_head.pt")
    torch.testing.assert_close(heads.state_dict()["heads.2.blocks.0.linear.weight"], stored["2.0.linear.weight"])


def test_fresh_heads_are_not_taken_for_trained_ones(finished: FinetuneConfig) -> None:
    heads = start(finished, finished)
    with pytest.raises(CheckpointError, match="must have norm"):
        check_loaded(heads, trained_weights(finished), "first")
    with pytest.raises(CheckpointError, match="'first' is as heads begin: .* are zero"):
        check_loaded(heads, heads.state_dict(), "first")


def test_the_end_of_sequence_is_always_in_the_draft_vocabulary(finished: FinetuneConfig) -> None:
    target = Target(finished)
    counts = torch.arange(target.backbone.vocab_size).flip(0)
    counts[list(target.eos_ids)] = 0
    heads = start_heads(replace(finished, draft_vocab_size=5), target.backbone, counts, target.eos_ids)
    assert heads.draft_ids is not None and set(target.eos_ids) < set(heads.draft_ids.tolist())


def test_a_head_that_did_not_move_is_named(finished: FinetuneConfig) -> None:
    heads = start(finished, finished)
    before = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    with torch.no_grad():
        for k in (0, 2):
            heads.heads[k].blocks[0].linear.bias += 1
    with pytest.raises(MedusaError, match="head 1 did not"):
        check_trained(before, heads)
    with torch.no_grad():
        heads.heads[1].blocks[0].linear.bias += 1
    check_trained(before, heads)


def test_weights_that_the_last_step_broke_are_named(finished: FinetuneConfig) -> None:
    heads = start(finished, finished)
    before = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    with torch.no_grad():
        heads.heads[1].blocks[0].linear.bias[3] = float("inf")
    with pytest.raises(MedusaError, match="tensor heads.1.blocks.0.linear.bias is not finite after training"):
        check_trained(before, heads)


def test_pieces_of_a_step_are_named_among_the_settings_where_there_are_several(finished: FinetuneConfig) -> None:
    assert "gradient_accumulation" not in settings(finished)
    assert settings(replace(finished, gradient_accumulation=2))["gradient_accumulation"] == 2


def test_settings_at_their_default_are_those_of_earlier_runs(finished: FinetuneConfig) -> None:
    assert not {"loss", "ema", "learning_rates", "teacher"} & settings(finished).keys()
    changed = settings(replace(finished, ema=0.5, learning_rates={"blocks": 2.0}))
    assert changed["ema"] == 0.5 and changed["learning_rates"] == {"blocks": 2.0}


def test_the_record_tells_coverage_and_accuracy(finished: FinetuneConfig) -> None:
    result = read_done(Path(finished.output), "train")["result"]
    assert 0.9 < result["draft_coverage"] <= 1
    heads = load_file(Path(finished.output) / "train" / WEIGHTS_NAME)
    data = TokenData(Path(finished.output) / "data", "held_out")
    answers = torch.cat([conversation.input_ids[conversation.mask] for conversation in data])
    share = torch.isin(answers, heads["draft_ids"].to(answers.dtype)).float().mean()
    assert result["held_out_draft_coverage"] == pytest.approx(float(share))
    assert set(result["accuracy"]) == {f"top{top}_head_{k}" for top in (1, 5) for k in range(3)}
    assert result["heads"]["draft_vocab_size"] == 64


def test_trained_heads_are_read_as_they_will_be_used(finished: FinetuneConfig) -> None:
    heads = load_trained(finished, Target(finished).backbone)
    stored = trained_weights(finished)
    assert all(torch.equal(tensor, stored[name].to(tensor.dtype)) for name, tensor in heads.state_dict().items())


def test_damaged_trained_heads_are_named(finished: FinetuneConfig, tmp_path: Path) -> None:
    shutil.copytree(finished.output, tmp_path / "run")
    config = replace(finished, output=str(tmp_path / "run"))
    path = tmp_path / "run" / "train" / "heads.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"heads\.safetensors cannot be read"):
        load_trained(config, Target(config).backbone)
