"""The calibrate stage."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from medusa_spec import MedusaModel
from medusa_spec.checkpoint import read_config
from medusa_spec.cost import SIZES
from medusa_spec.finetune import calibrate
from medusa_spec.finetune.calibrate import count, run_calibrate
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.stages import read_done
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.train import load_trained
from medusa_spec.tree import best_tree, expected_accepted


def again(finished: FinetuneConfig, folder: Path, **changes: object) -> FinetuneConfig:
    """The same run before its calibrate stage."""
    shutil.copytree(finished.output, folder)
    for name in ("calibrate", "report"):
        (folder / f"{name}.done.json").unlink()
    return replace(finished, output=str(folder), **changes)  # type: ignore[arg-type]


def test_the_saved_tree_is_the_best_of_its_size(finished: FinetuneConfig) -> None:
    heads = load_trained(finished, Target(finished).backbone)
    values, record = count(finished, heads)
    config = read_config(Path(finished.output) / "heads")
    assert config.values == values and config.tree == best_tree(values, 7)
    result = read_done(Path(finished.output), "calibrate")["result"]
    assert result["expected_mu"] == [round(mu, 4) for mu in expected_accepted(values, 15)]
    assert result["top1"] == record["top1"] and values.total == record["positions"] > 100


def test_the_tree_pays_by_measured_times(
    finished: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def times(backbone: object, sizes: list[int], prefix: int) -> dict[int, float]:
        asked.extend(sizes)
        return {size: 1.0 if size <= 4 else 100.0 for size in sizes}

    monkeypatch.setattr(calibrate, "measure_pass_times", times)
    monkeypatch.setattr(calibrate, "draft_seconds", lambda heads, backbone, tree: 0.0)
    config = again(finished, tmp_path / "run", tree_size=None)
    result = run_calibrate(config, Target(config))
    assert asked == [n for n in SIZES if n <= 16] and result["tree_size"] == 3
    assert result["pass_seconds"]["8"] == 100.0


def test_a_level_must_be_worth_its_drafting(
    finished: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "measure_pass_times", lambda backbone, sizes, prefix: dict.fromkeys(sizes, 1.0))
    depths = {}
    for name, price in (("dear", 100.0), ("free", 0.0)):
        monkeypatch.setattr(calibrate, "draft_seconds", lambda heads, backbone, tree, p=price: p * (tree.depth > 1))
        config = again(finished, tmp_path / name, tree_size=None)
        depths[name] = run_calibrate(config, Target(config))["tree_depth"]
    assert depths["dear"] == 1 < depths["free"]


def test_real_times_choose_a_size_within_bounds(finished: FinetuneConfig, tmp_path: Path) -> None:
    config = again(finished, tmp_path / "run", tree_size=None)
    result = run_calibrate(config, Target(config))
    assert 0 <= result["tree_size"] <= 15 and all(s > 0 for s in result["pass_seconds"].values())


def test_the_record_names_no_path_of_this_machine(finished: FinetuneConfig, tmp_path: Path) -> None:
    config = again(finished, tmp_path / "run", base_name="org/base")
    run_calibrate(config, Target(config))
    text = (tmp_path / "run" / "heads" / "medusa_config.json").read_text()
    assert str(tmp_path) not in text and str(Path(finished.data[0]).parent) not in text
    saved = read_config(tmp_path / "run" / "heads")
    assert saved.base_model_name_or_path == "org/base" and saved.training["data"]["names"] == ["chats.jsonl"]
    assert saved.chat_template_hash is not None and saved.lm_head_hash is not None


def test_parallel_heads_get_rules_by_which_their_trees_grow(
    finished: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A level costs nothing; the draft of all heads is paid before a tree is made."""
    monkeypatch.setattr(
        calibrate, "measure_pass_times", lambda backbone, sizes, prefix: {n: 1 + n / 999 for n in sizes}
    )
    monkeypatch.setattr(calibrate, "draft_seconds", lambda heads, backbone, tree: 0.0001 * tree.depth)
    config = again(finished, tmp_path / "run", tree_size=None)
    result = run_calibrate(config, Target(config))
    growth = read_config(tmp_path / "run" / "heads").growth
    assert growth is not None and result["growth"] == growth.to_dict()
    assert (growth.level_seconds, growth.width) == (0.0, config.tree_width)
    depth = result["tree_depth"]
    expected = expected_accepted(read_config(tmp_path / "run" / "heads").values.up_to(depth), 15)
    best = max((1 + mu) / (1 + (size + 1) / 999 + 0.0001 * depth) for size, mu in enumerate(expected))
    assert growth.token_seconds == pytest.approx(1 / best, rel=1e-3)
    model = MedusaModel(Target(config).model, tmp_path / "run" / "heads", probe=False)
    assert model.drafter.growth == growth
    output = model.generate(torch.arange(3, 12)[None], do_sample=False, max_new_tokens=20)
    assert model.last_stats.drafted_passes > 0
    assert torch.equal(
        output, model.generate(torch.arange(3, 12)[None], do_sample=False, max_new_tokens=20, draft_nodes=0)
    )


def test_where_plain_decoding_is_fastest_the_saved_heads_decode_plainly(
    finished: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "measure_pass_times", lambda backbone, sizes, prefix: {n: float(n) for n in sizes})
    config = again(finished, tmp_path / "run", tree_size=None)
    assert run_calibrate(config, Target(config))["tree_size"] == 0
    model = MedusaModel(Target(config).model, tmp_path / "run" / "heads", probe=False)
    model.generate(torch.arange(3, 9)[None], do_sample=False, max_new_tokens=4)
    assert set(model.last_stats.pass_sizes) == {1} and model.medusa_config.growth is None
