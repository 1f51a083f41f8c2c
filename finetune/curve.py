"""How much data buys how much μ: heads trained on nested parts of a finished run's states. Knows no plots."""

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from medusa_spec.checkpoint import save_heads
from medusa_spec.config import MedusaConfig
from medusa_spec.errors import ConfigError
from medusa_spec.files import read_json, write_json
from medusa_spec.finetune import stages, train
from medusa_spec.finetune.batches import step_batches
from medusa_spec.finetune.calibrate import count
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.subset import SubsetStore, answer_counts, answer_tokens, nested_subsets
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.tokens import TokenData
from medusa_spec.finetune.trainer import last_complete_checkpoint, train_heads
from medusa_spec.finetune.wanted import wanted_states
from medusa_spec.heads import DraftHeads, coverage
from medusa_spec.tree import best_tree, expected_accepted

USUAL_TREE = 15
"""Draft nodes of the tree that a point's heads are saved with, unless `tree_size` says otherwise."""


def run_settings(run: Path) -> dict[str, Any]:
    """Model, revision and dtype of a finished states stage, as fields of `FinetuneConfig`."""
    data, states = (stages.read_done(run, stage)["settings"] for stage in ("data", "states"))
    dtype = states["dtype"].removeprefix("torch.")
    return {"model": data["model"], "revision": data["revision"], "dtype": dtype, "output": str(run)}


def halvings(run: Path, count: int = 5) -> list[int]:
    """Answer tokens of the run's train split, and halves of them: 1/16, 1/8, … 1."""
    total = stages.read_done(run, "data")["result"]["splits"]["train"]["answer_tokens"]
    return [total >> shift for shift in reversed(range(count))]


def epochs_for(steps_per_epoch: int, *, epochs: int, least_steps: int, most_epochs: int) -> int:
    """Passes over a part of the data: few data want more of them, up to where they would only be learnt by heart.

    ```
    epochs 6, least 600 steps, most 24:    1,000 steps an epoch -> 6    50 -> 12    10 -> 24
    ```
    """
    return min(max(epochs, -(-least_steps // steps_per_epoch)), max(most_epochs, epochs))


def measure_point(
    config: FinetuneConfig, target: Target, tokens: int, folder: Path, *, least_steps: int = 0, most_epochs: int = 24
) -> dict[str, Any]:
    """Trains heads on `tokens` answer tokens of a run and measures them on all of its held-out states.

    Stopped, it goes on from its last checkpoint; finished, it is only read.

    Args:
        config: Recipe; its `output` is the run, of which only `data` and `states` are read.
        target: The run's.
        tokens: Answer tokens to train on; see `nested_subsets`.
        folder: Of this point: checkpoints, history, and `heads/`, which can be loaded.
        least_steps: See `epochs_for`, and so is the next.
        most_epochs: Most passes.

    Returns:
        A record: data (`tokens` are those of prompts and answers), epochs, steps, seconds, accuracy by head, expected
        μ of the best tree of every size.

    Raises:
        ConfigError: If the run's states are not what this family of heads reads.
    """
    _check_states(config)
    wanted = {**train.settings(config), "tokens": tokens, "least_steps": least_steps, "most_epochs": most_epochs}
    wanted |= {"tree_width": config.tree_width, "max_tree_size": config.max_tree_size}
    if stages.begin(folder, "point", wanted):
        return dict(stages.read_done(folder, "point")["result"])
    run = Path(config.output)
    data = TokenData(run / "data", "train")
    kept = nested_subsets(answer_tokens(data), [tokens], seed=config.seed)[0]
    counts = answer_counts(data, kept, target.backbone.vocab_size)
    store = SubsetStore(run, "train", config.num_heads, kept, teacher=config.loss != "cross_entropy")
    heads = train.start_heads(config, target.backbone, counts, target.eos_ids)
    steps = step_batches(
        store, attends=heads.attends, batch_positions=config.batch_positions, epochs=1, seed=config.seed
    ).steps_per_epoch
    config = replace(
        config, epochs=epochs_for(steps, epochs=config.epochs, least_steps=least_steps, most_epochs=most_epochs)
    )
    result = {
        "conversations": int(kept.sum()),
        "answer_tokens": int(counts.sum()),
        "tokens": sum(length for length, taken in zip(data.lengths(), kept.tolist(), strict=True) if taken),
        "positions": len(store.decoding_rows()),
        "epochs": config.epochs,
        "draft_coverage": 1.0 if heads.draft_ids is None else coverage(counts, heads.draft_ids.cpu()),
        **_trained(config, heads, store, folder),
        **_measured(config, target, heads, folder),
    }
    stages.finish(folder, "point", wanted, result)
    return result


def _check_states(config: FinetuneConfig) -> None:
    held = read_json(Path(config.output) / "states" / "manifest.json")
    asked = wanted_states(config)
    if (asked.whole and not held["whole"]) or (asked.taps and asked.taps != tuple(held["taps"])):
        raise ConfigError(
            f"the run must hold the states that kind {config.kind!r} reads, {asdict(asked)}, but {config.output} has "
            f"whole {held['whole']} and taps {held['taps']}; run data and states once more with this kind"
        )


def _trained(config: FinetuneConfig, heads: DraftHeads, store: StateStore, folder: Path) -> dict[str, Any]:
    """Trains in place; steps, seconds (None after an interruption), and held-out accuracy by epoch."""
    model = train.with_losses(heads, config)
    resumed, began = last_complete_checkpoint(folder) is not None, time.perf_counter()
    held_out = StateStore(Path(config.output), "held_out", config.num_heads)
    history = train_heads(model, store, held_out, config, folder)
    seconds = time.perf_counter() - began
    write_json(folder / "history.json", history)
    return {
        "steps": max(int(entry["step"]) for entry in history),
        "seconds": None if resumed else round(seconds, 1),
        "top1_by_epoch": [entry["top1_head_0"] for entry in history if "top1_head_0" in entry],
    }


def _measured(config: FinetuneConfig, target: Target, heads: DraftHeads, folder: Path) -> dict[str, Any]:
    """Saves heads as they will be used, and counts what they guess on the held-out states."""
    rounded = {
        name: tensor.to(torch.bfloat16).float() if tensor.is_floating_point() else tensor
        for name, tensor in heads.state_dict().items()
    }
    heads.load_state_dict(rounded)
    heads.requires_grad_(False).eval()
    values, record = count(config, heads)
    expected = expected_accepted(values, config.max_tree_size)
    size = min(USUAL_TREE if config.tree_size is None else config.tree_size, len(expected) - 1)
    saved = MedusaConfig(
        heads=heads.config,
        base_model_name_or_path=config.base_name or config.model,
        base_revision=config.revision,
        lm_head_hash=target.backbone.lm_head_hash(),
        chat_template_hash=stages.read_done(Path(config.output), "data")["result"]["chat_template_hash"],
        tree=best_tree(values, size),
        values=values,
    )
    save_heads(folder / "heads", heads, saved)
    return {
        "top1": record["top1"],
        "top5": record["top5"],
        "held_out_positions": record["positions"],
        "expected_mu": [round(mu, 4) for mu in expected],
    }
