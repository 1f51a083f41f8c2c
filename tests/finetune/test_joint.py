"""The joint stage: resumable, exact to the adapted target, and nothing of it where it is not asked for."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from medusa_spec import MedusaModel
from medusa_spec.checkpoint import ADAPTER_WEIGHTS, WEIGHTS_NAME, read_config
from medusa_spec.errors import ConfigError
from medusa_spec.finetune import FinetuneConfig, run_pipeline
from medusa_spec.finetune.batches import TextBatches
from medusa_spec.finetune.given_heads import own_folder
from medusa_spec.finetune.stages import read_done
from medusa_spec.finetune.target import Target
from medusa_spec.heads import FAMILIES as heads_of
from medusa_spec.testing import tiny, tiny_tokenizer

MakeConfig = Callable[..., FinetuneConfig]
JOINT: dict[str, Any] = {
    "target_rank": 4,
    "target_learning_rate": 0.003,
    "heads_rate": 3.0,
    "heads_weight": 0.5,
    "joint_batch_tokens": 1024,
}

ALONE: dict[str, Any] = {"epochs": 6, "batch_positions": 2048}
"""Settings of the heads' own training, which there is none of, as they are by default."""


def run(finished: FinetuneConfig, folder: Path, *, stages: Any = None, **changes: Any) -> FinetuneConfig:
    """On data, states and heads of the finished run, as far as they are of the same family."""
    folder.mkdir()
    config = replace(finished, output=str(folder), **(JOINT | changes))
    same = config.kind == finished.kind and config.init_from is None
    whole = heads_of[config.kind].attends
    for name in ("data*", *([] if whole else ["states*"]), *(["train*"] if same else [])):
        for path in Path(finished.output).glob(name):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
    run_pipeline(config, stages=stages)
    return config


@pytest.fixture(scope="module")
def joined(finished: FinetuneConfig, tmp_path_factory: pytest.TempPathFactory) -> FinetuneConfig:
    """The settings of a run through joint training; nobody may change its folder."""
    return run(finished, tmp_path_factory.mktemp("joined") / "run")


def adapted_in_float64(config: FinetuneConfig) -> Any:
    """The adapted target as anybody would load it."""
    base = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float64)
    return PeftModel.from_pretrained(base, Path(config.output) / "heads" / "adapter").merge_and_unload().eval()


def test_heads_get_better_and_the_record_says_what_became_of_the_target(joined: FinetuneConfig) -> None:
    result = read_done(Path(joined.output), "joint")["result"]
    target = result["target"]
    assert sum(target["top1"]) > sum(target["top1_before"])
    assert 0 < target["divergence"] < 0.5 and 0.5 < target["same_choice"] <= 1
    assert target["perplexity_change"] == pytest.approx(target["perplexity"] / target["perplexity_without"] - 1)
    history = json.loads((Path(joined.output) / "joint" / "history.json").read_text())
    assert {"loss", "target_loss", "loss_head_0", "loss_head_2"} <= set(history[0])
    saved = read_config(Path(joined.output) / "heads")
    assert saved.training["target"] == target and saved.training["steps"] == result["steps"] > 0
    assert saved.training["recipe"]["target_rank"] == 4 and "train" not in saved.training["recipe"]
    assert saved.target_adapter_hash is not None and saved.tree is not None
    card = (Path(joined.output) / "heads" / "README.md").read_text()
    assert "Output is exactly that of the adapted model, *not* that of" in card
    assert "## The adapted target" in (Path(joined.output) / "report" / "report.md").read_text()


def test_heads_rate_is_on_the_heads_alone(finished: FinetuneConfig, tmp_path: Path) -> None:
    moved = []
    for rate in (1e-3, 1.0):
        config = run(finished, tmp_path / f"run{rate}", stages=("joint",), heads_rate=rate, joint_max_steps=3)
        start, end = (
            load_file(Path(folder) / WEIGHTS_NAME)
            for folder in (Path(config.output) / "train", Path(config.output) / "joint")
        )
        key = "heads.0.blocks.0.linear.weight"
        adapter = load_file(Path(config.output) / "joint" / "adapter" / ADAPTER_WEIGHTS)
        size = max(float(tensor.abs().max()) for name, tensor in adapter.items() if "lora_B" in name)
        moved.append((float((end[key] - start[key]).abs().max()), size))
    assert moved[0][0] < 0.01 * moved[1][0] and 0.5 < moved[0][1] / moved[1][1] < 2


def test_the_folder_alone_decodes_exactly_what_the_adapted_target_says(
    joined: FinetuneConfig, caplog: pytest.LogCaptureFixture
) -> None:
    adapted = adapted_in_float64(joined)
    plain = AutoModelForCausalLM.from_pretrained(joined.model, dtype=torch.float64)
    model = MedusaModel.from_pretrained(Path(joined.output) / "heads", dtype=torch.float64)
    assert "with the adapter that its heads were trained with, not that of" in model.exact_to
    prompts = [torch.randint(5, 90, (1, 9), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    differ = 0
    for prompt in prompts:
        expected = adapted.generate(prompt, do_sample=False, max_new_tokens=30)
        assert torch.equal(model.generate(prompt, do_sample=False, max_new_tokens=30), expected)
        assert max(model.last_stats.pass_sizes) == 8
        differ += not torch.equal(plain.generate(prompt, do_sample=False, max_new_tokens=30), expected)
        torch.manual_seed(5)
        sampled = adapted.generate(prompt, do_sample=True, max_new_tokens=30)
        torch.manual_seed(5)
        assert torch.equal(model.generate(prompt, do_sample=True, max_new_tokens=30), sampled)
    assert differ  # it is another model, indeed


def test_a_target_that_is_named_stays_as_it_is_and_the_user_is_told(joined: FinetuneConfig, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"trained together with an adapter on .* which this target has not\. Output"):
        model = MedusaModel.from_pretrained(joined.model, heads=Path(joined.output) / "heads", dtype=torch.float64)
    plain = AutoModelForCausalLM.from_pretrained(joined.model, dtype=torch.float64)
    prompt = torch.randint(5, 90, (1, 9))
    expected = plain.generate(prompt, do_sample=False, max_new_tokens=20)
    assert torch.equal(model.generate(prompt, do_sample=False, max_new_tokens=20), expected)
    base = AutoModelForCausalLM.from_pretrained(joined.model, dtype=torch.float64)
    worn = PeftModel.from_pretrained(base, Path(joined.output) / "heads" / "adapter")
    wrapped = MedusaModel(worn, Path(joined.output) / "heads")  # an adapter of the user's own: no warning
    expected = adapted_in_float64(joined).generate(prompt, do_sample=False, max_new_tokens=20)
    assert torch.equal(wrapped.generate(prompt, do_sample=False, max_new_tokens=20), expected)


def test_what_is_saved_again_has_its_adapter(joined: FinetuneConfig, tmp_path: Path) -> None:
    model = MedusaModel.from_pretrained(Path(joined.output) / "heads", dtype=torch.float32)
    model.save_pretrained(tmp_path / "again")
    stored = (Path(joined.output) / "heads" / "adapter" / ADAPTER_WEIGHTS).read_bytes()
    assert (tmp_path / "again" / "adapter" / ADAPTER_WEIGHTS).read_bytes() == stored
    assert MedusaModel.from_pretrained(tmp_path / "again").exact_to == model.exact_to


def test_a_killed_and_resumed_run_gives_the_same_bits(
    joined: FinetuneConfig, finished: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, extract = TextBatches.__getitem__, "medusa_spec.finetune.joint.extract_shard"

    def stop(self: TextBatches, step: int) -> dict[str, torch.Tensor]:
        if step == 7 and self.epochs == 2:
            raise KeyboardInterrupt
        return read(self, step)

    def kill(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TextBatches, "__getitem__", stop)
        run(finished, tmp_path / "run")
    again = replace(joined, output=str(tmp_path / "run"))
    assert (tmp_path / "run" / "joint" / "checkpoint-4" / "complete").exists()
    assert not any("base_layer" in name for name in load_file(tmp_path / "run/joint/checkpoint-4/model.safetensors"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(extract, kill)  # after training, before the states
        run_pipeline(again, stages=("joint",))
    assert not (tmp_path / "run" / "joint.done.json").exists()
    run_pipeline(again, stages=("joint", "calibrate"))
    for name in (
        "joint/trained",
        "joint/heads",
        "joint/adapter/adapter_model",
        "heads/heads",
        "heads/adapter/adapter_model",
    ):
        first, second = (Path(folder) / f"{name}.safetensors" for folder in (joined.output, again.output))
        assert first.read_bytes() == second.read_bytes(), name
    done = [read_done(Path(folder), "joint")["result"] for folder in (joined.output, again.output)]
    assert done[0] == done[1]


def test_given_heads_go_straight_into_joint_training(finished: FinetuneConfig, tmp_path: Path) -> None:
    heads = Path(finished.output) / "heads"
    config = run(finished, tmp_path / "run", **ALONE, init_from=str(heads), joint_max_steps=3, report_prompts=1)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert "train" not in names and {"joint", "heads", "report"} <= names
    assert config.joint_alone
    top1 = read_config(heads).training["held_out"]["top1"]
    assert read_done(tmp_path / "run", "joint")["result"]["target"]["top1_before"] == pytest.approx(top1, abs=0.02)


@pytest.mark.parametrize(("kind", "options"), [("hydra", {}), ("fused", {"taps": "0,1"})])
def test_other_families_are_trained_with_their_target(
    kind: str, options: dict[str, Any], finished: FinetuneConfig, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"kind": kind, "options": options, "max_steps": 4, "joint_max_steps": 6}
    config = run(finished, tmp_path / "run", stages=("states", "train", "joint", "calibrate"), **settings)
    target = read_done(tmp_path / "run", "joint")["result"]["target"]
    assert target["divergence"] > 0 and len(target["top1"]) == 3
    model = MedusaModel.from_pretrained(tmp_path / "run" / "heads", dtype=torch.float64)
    prompt = torch.randint(5, 90, (1, 9), generator=torch.Generator().manual_seed(1))
    expected = adapted_in_float64(config).generate(prompt, do_sample=False, max_new_tokens=20)
    assert torch.equal(model.generate(prompt, do_sample=False, max_new_tokens=20), expected)


def test_the_target_is_given_back_and_then_the_adapted_one_is_the_runs(
    finished: FinetuneConfig, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    config = replace(finished, output=str(tmp_path / "run"), **JOINT, joint_max_steps=2)
    target = Target(config)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    held = target.model
    for name in ("data*", "states*", "train*"):
        for path in Path(finished.output).glob(name):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / "run" / path.name)
    run_pipeline(config, stages=("joint",), target=target)
    after = held.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert target.adapter == tmp_path / "run" / "joint" / "adapter" and target.model is not held
    changed = [name for name, tensor in target.model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert changed and all("proj" in name for name in changed)


def test_without_a_rank_there_is_no_joint_stage(finished: FinetuneConfig) -> None:
    assert not (Path(finished.output) / "joint.done.json").exists()
    assert read_config(Path(finished.output) / "heads").target_adapter_hash is None


def test_heads_of_an_adapted_target_are_not_what_another_training_begins_with(joined: FinetuneConfig) -> None:
    with pytest.raises(ConfigError, match=r"init_from must be heads of the target as it is, got .*save the adapted"):
        own_folder(str(Path(joined.output) / "heads"))


def test_settings_that_cannot_be_are_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    for changes, words in (
        ({"target_rank": 0}, "target_rank must be an integer of 1 or more"),
        ({"target_alpha": 2.0}, "target_alpha must be above 0, and None without target_rank, got 2.0"),
        ({"target_rank": 4, "init_from": "x", "adapter_rank": 4}, "target_rank must be None with adapter_rank, got 4"),
        ({"target_loss": "l2"}, "target_loss must be one of kl, cross_entropy, got 'l2'"),
        ({"heads_weight": 0.0}, "heads_weight must be above 0, got 0.0"),
        ({"joint_epochs": 0}, "joint_epochs must be an integer of 1 or more, got 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_config(tmp_path, **changes)
    assert make_config(tmp_path, target_rank=32).used_target_alpha == 16.0  # as published
    with pytest.raises(ConfigError, match=r"'joint'.*target_loss was 'kl', is 'cross_entropy'"):
        from medusa_spec.finetune.stages import begin

        begin(tmp_path, "joint", {"target_loss": "kl"})
        begin(tmp_path, "joint", {"target_loss": "cross_entropy"})


def quantised(folder: Path) -> Path:
    """A tiny target in four bits."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": len(tokenizer)}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    tiny("llama", dtype=torch.float32, **sizes, **ids).save_pretrained(folder / "dense")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder / "dense", quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    model.save_pretrained(folder / "nf4")
    tokenizer.save_pretrained(folder / "nf4")
    return folder / "nf4"


def test_a_quantised_target_is_trained_on_and_stays_quantised(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", model=str(quantised(tmp_path)), epochs=1, **JOINT, joint_max_steps=4)
    run_pipeline(config, stages=("data", "states", "train", "joint", "calibrate"))
    target = read_done(tmp_path / "run", "joint")["result"]["target"]
    assert target["divergence"] > 0
    model = MedusaModel.from_pretrained(tmp_path / "run" / "heads", dtype=torch.float32)
    kinds = {type(module).__name__ for module in model.target.modules()}
    assert "Linear4bit" in kinds and model.backbone.adapters
    base = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "run" / "heads" / "adapter").eval()
    prompt = torch.randint(5, 90, (1, 9), generator=torch.Generator().manual_seed(1))
    expected = adapted.generate(input_ids=prompt, do_sample=False, max_new_tokens=16)
    assert torch.equal(model.generate(prompt, do_sample=False, max_new_tokens=16), expected)


def test_a_target_through_which_nothing_can_be_trained_is_refused() -> None:
    from types import SimpleNamespace

    from medusa_spec.finetune.lora import adapt_target
    from medusa_spec.testing import tiny_model

    model: LlamaForCausalLM = tiny_model()
    model.hf_quantizer = SimpleNamespace(is_trainable=False, quantization_config=SimpleNamespace(quant_method="awq"))
    with pytest.raises(ConfigError, match=r"target_rank must be None for this target, got 4: it is quantised by awq"):
        adapt_target(model, rank=4, alpha=2.0, seed=0)
