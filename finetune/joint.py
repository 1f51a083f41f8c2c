"""The joint stage: heads and an adapter on their target are trained together, on texts. Knows no adapter library."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers.utils import logging

from medusa_spec.backbone import Backbone
from medusa_spec.checkpoint import TARGET_ADAPTER, WEIGHTS_NAME, read_weights
from medusa_spec.errors import MedusaError
from medusa_spec.files import read_json, write_json, write_tensors
from medusa_spec.finetune import stages
from medusa_spec.finetune.batches import TextBatches
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.given_heads import own_folder
from medusa_spec.finetune.joint_batches import TokenTexts
from medusa_spec.finetune.joint_model import JointModel
from medusa_spec.finetune.joint_trainer import train_jointly
from medusa_spec.finetune.lora import adapt_target, save_target_adapter
from medusa_spec.finetune.processes import everyone
from medusa_spec.finetune.records import fingerprint
from medusa_spec.finetune.states import extract_shard, plan_shards
from medusa_spec.finetune.store import StateStore, read_shard, shard_path
from medusa_spec.finetune.target import Target, compute_dtype
from medusa_spec.finetune.tokens import TokenData
from medusa_spec.finetune.train import check_trained, coverages, read_heads, start_heads
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.finetune.wanted import wanted_states
from medusa_spec.finetune.weights import weights_name
from medusa_spec.heads import DraftHeads

logger = logging.get_logger(__name__)

STATES = "states"
"""Folder of the adapted target's held-out states."""
TRAINED = "trained.safetensors"
"""Heads and adapter as training left them; its presence says that it is over."""
_DEPENDS_ON = (
    "kind num_heads num_layers lm_head rank draft_vocab_size init_from target_rank target_alpha target_loss "
    "target_learning_rate heads_rate heads_weight joint_epochs joint_max_steps joint_batch_tokens weight_decay warmup "
    "max_grad_norm depth_decay unroll feature_weight save_steps seed"
).split()


def settings(config: FinetuneConfig) -> dict[str, Any]:
    """What the stage's result depends on."""
    output = Path(config.output)
    found: dict[str, Any] = {name: getattr(config, name) for name in _DEPENDS_ON}
    found |= {name: getattr(config, name) for name in ("options", "learning_rates") if getattr(config, name)}
    if config.gradient_accumulation != 1:  # the same sums in another order
        found["gradient_accumulation"] = config.gradient_accumulation
    if config.joint_alone:
        found["weights"] = weights_name(config)
        found["data"] = stages.read_done(output, "data")["hash"]
        found["init_weights"] = fingerprint(str(own_folder(str(config.init_from)) / WEIGHTS_NAME))
    else:
        found["train"] = stages.read_done(output, "train")["hash"]
    return found | {"dtype": str(compute_dtype(config))}


def run_joint(config: FinetuneConfig, target: Target) -> dict[str, Any]:
    """Runs the stage, from its last checkpoint if it was stopped; does nothing unless `target_rank` asks for it. Under
    a launcher all processes run it together.

    Afterwards the target of the run is the adapted one.

    Returns:
        A record as that of the train stage, and what training did to the target: `target`.
    """
    if not config.joint:
        return {}
    output, processes = Path(config.output), everyone()
    folder, wanted = output / "joint", settings(config)
    done = stages.begin(output, "joint", wanted)
    processes.wait()
    if done:
        target.adapt(folder / TARGET_ADAPTER)
        return dict(stages.read_done(output, "joint")["result"])
    folder.mkdir(exist_ok=True)
    result = _train(config, target, folder)
    if not processes.main:
        return {}
    target.adapt(folder / TARGET_ADAPTER)
    _read_held_out(config, target, folder / STATES)
    stages.finish(output, "joint", wanted, result)
    return result


def _train(config: FinetuneConfig, target: Target, folder: Path) -> dict[str, Any]:
    """Trains, measures and writes; the target is given back as it was."""
    heads = _first_heads(config, target)
    start = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    adapted = adapt_target(
        target.release(), rank=config.target_rank or 0, alpha=config.used_target_alpha, seed=config.seed
    )
    backbone = Backbone(adapted)
    try:
        trained = TrainedHeads(
            heads, depth_decay=config.depth_decay, feature_weight=config.feature_weight, unroll=config.unroll
        )
        model = JointModel(backbone, trained, heads_weight=config.heads_weight, target_loss=config.target_loss).eval()
        texts = {split: TokenTexts(Path(config.output), split, config.num_heads) for split in ("train", "held_out")}
        if (folder / TRAINED).exists():
            model.load_state_dict(read_weights(folder / TRAINED))
        else:
            _train_and_keep(model, texts, config, folder)
        if not everyone().main:
            return {}
        check_trained(start, heads)
        _check_moved(model)
        after = model.eval().measure(_in_order(texts["held_out"], config))
        save_target_adapter(folder / TARGET_ADAPTER, adapted, config.base_name or config.model)
    finally:
        backbone.detach()
        adapted.unload()
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in heads.state_dict().items()}
    write_tensors(folder / WEIGHTS_NAME, state)
    history = read_json(folder / "history.json")
    return {
        "heads": heads.config.to_dict(),
        **coverages(config, heads),
        "steps": max((int(entry["step"]) for entry in history), default=0),
        "target": after | {"top1_before": read_json(folder / "before.json")["top1"]},
    }


def _train_and_keep(model: JointModel, texts: dict[str, TokenTexts], config: FinetuneConfig, folder: Path) -> None:
    """Trains, and leaves what was trained, its log, and what was measured before."""
    processes, before = everyone(), None
    if processes.main:
        before = model.measure(_in_order(texts["held_out"], config))
    history = train_jointly(model, texts["train"], config, folder)
    if processes.main:
        write_json(folder / "history.json", history)
        write_json(folder / "before.json", before)
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        write_tensors(folder / TRAINED, state)


def _first_heads(config: FinetuneConfig, target: Target) -> DraftHeads:
    """Those of the train stage, or given ones, to be trained on."""
    if not config.joint_alone:
        return read_heads(config, target.backbone, "train", rounded=False).requires_grad_(True).train()
    counts = TokenData(Path(config.output) / "data", "train").answer_counts(target.backbone.vocab_size)
    return start_heads(config, target.backbone, counts, target.eos_ids)


def _in_order(texts: TokenTexts, config: FinetuneConfig) -> Iterator[dict[str, torch.Tensor]]:
    """All texts once, those of similar length together."""
    source: Any = texts
    batches = TextBatches(source, batch_positions=config.joint_batch_tokens, epochs=1, seed=0)
    return (batches[step] for step in range(len(batches)))


def _check_moved(model: JointModel) -> None:
    """The adapter has moved: its second factors began at zero. Parts of it may not have, experts that no token was sent
    to: these are told.

    Raises:
        MedusaError: If nothing has.
    """
    moved = {name: bool(tensor.any()) for name, tensor in model.state_dict().items() if ".lora_B." in name}
    still = [name for name, any_part in moved.items() if not any_part]
    if len(still) == len(moved):
        raise MedusaError(
            "the adapter of the target must have changed, but did not anywhere: no gradient reached it, or "
            "target_learning_rate is too low"
        )
    if still:
        logger.warning(f"no gradient reached {len(still)} of {len(moved)} parts of the adapter, {still[0]} first")


def _read_held_out(config: FinetuneConfig, target: Target, folder: Path) -> None:
    """States of the adapted target, from which its heads are calibrated."""
    folder.mkdir(exist_ok=True)
    data, wanted = TokenData(Path(config.output) / "data", "held_out"), wanted_states(config)
    plans = plan_shards(data, config, whole=wanted.whole)
    with tqdm(total=sum(data.lengths()), unit="tok", unit_scale=True, desc="joint: held-out states") as bar:
        for number, plan in enumerate(plans):
            extract_shard(shard_path(folder, "held_out", number), plan, data, target, wanted, bar)
    first = read_shard(shard_path(folder, "held_out", 0))
    splits = {"held_out": [plan.positions for plan in plans]}
    write_json(folder / "manifest.json", {"hidden_size": first["h"].shape[1], **asdict(wanted), "splits": splits})


def held_out_store(config: FinetuneConfig, num_heads: int, *, teacher: bool = False) -> StateStore:
    """The held-out states on which the result is calibrated: of the target as it is at the end of the run."""
    output = Path(config.output)
    if not config.joint:
        return StateStore(output, "held_out", num_heads, teacher=teacher)
    return StateStore(output, "held_out", num_heads, folder=output / "joint" / STATES)
