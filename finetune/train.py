"""The train stage: fresh or given heads in, trained heads out. The target is only asked for its LM head."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from medusa_spec.backbone import Backbone
from medusa_spec.checkpoint import (
    TARGET_ADAPTER,
    WEIGHTS_NAME,
    load_heads,
    read_weights,
    save_heads,
)
from medusa_spec.config import MedusaConfig
from medusa_spec.errors import ConfigError, MedusaError
from medusa_spec.files import write_json, write_tensors
from medusa_spec.finetune import stages
from medusa_spec.finetune.batches import StepBatches, step_batches
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.given_heads import given_heads, own_folder
from medusa_spec.finetune.lora import adapt_heads, adapter_tensors, load_adapter_tensors
from medusa_spec.finetune.processes import everyone
from medusa_spec.finetune.records import fingerprint
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.tokens import TokenData
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.finetune.trainer import train_heads
from medusa_spec.finetune.watch_decoder import DecoderWatch, decoder_watch
from medusa_spec.head_adapters import save_adapter
from medusa_spec.heads import DraftHeads, HeadsConfig, coverage, make_heads, most_frequent
from medusa_spec.heads_note import weights_hash
from medusa_spec.target_adapter import adapter_hash, copy_adapter

_DEPENDS_ON = (
    "kind num_heads num_layers lm_head rank draft_vocab_size init_from epochs max_steps batch_positions learning_rate "
    "weight_decay warmup max_grad_norm depth_decay unroll unroll_ramp feature_weight save_steps seed"
).split()

_IF_USED = "options learning_rates ema adapter_rank adapter_alpha".split()


def settings(config: FinetuneConfig) -> dict[str, Any]:
    """What the stage's result depends on."""
    found: dict[str, Any] = {name: getattr(config, name) for name in _DEPENDS_ON}
    found |= {name: getattr(config, name) for name in _IF_USED if getattr(config, name)}
    if config.loss != "cross_entropy":
        found["loss"] = config.loss
    if config.kept_logits:
        found["teacher"] = stages.read_done(Path(config.output), "teacher")["hash"]
    if config.gradient_accumulation != 1:  # the same sums in another order
        found["gradient_accumulation"] = config.gradient_accumulation
    found["states"] = stages.read_done(Path(config.output), "states")["hash"]
    if config.init_from is not None:
        found["init_weights"] = fingerprint(str(own_folder(config.init_from) / WEIGHTS_NAME))
    return found


def run_train(config: FinetuneConfig, target: Target) -> dict[str, Any]:
    """Runs the stage, from its last checkpoint if it was stopped; under a launcher all processes run it together.

    Returns:
        A record: the heads' config, coverage of the draft vocabulary, steps, the last log lines.
    """
    output, wanted, processes = Path(config.output), settings(config), everyone()
    done = stages.begin(output, "train", wanted)
    processes.wait()
    if done:
        return dict(stages.read_done(output, "train")["result"])
    folder = output / "train"
    folder.mkdir(exist_ok=True)
    counts = TokenData(output / "data", "train").answer_counts(target.backbone.vocab_size)
    heads = start_heads(config, target.backbone, counts, target.eos_ids)
    start = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    model = with_losses(heads, config)
    train = StateStore(output, "train", config.num_heads, teacher=config.loss != "cross_entropy")
    held_out = StateStore(output, "held_out", config.num_heads, teacher=config.kept_logits > 0)
    history = train_heads(model, train, held_out, config, folder, _decoder(config, target))
    check_trained(start, heads)
    if not processes.main:
        return {}
    trained = heads.state_dict() if config.adapter_rank is None else adapter_tensors(heads)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in trained.items()}
    write_tensors(folder / WEIGHTS_NAME, state)
    write_json(folder / "history.json", history)
    result = {
        "heads": heads.config.to_dict(),
        **coverages(config, heads),
        "positions": len(train.decoding_rows()),
        "held_out_positions": len(held_out.decoding_rows()),
        "padding": round(_batches(config, train, heads).padding(), 4),
        "steps": max((int(entry["step"]) for entry in history), default=0),
        "accuracy": _last(history, "top1_head_0"),
        "masked_batches": sum(int(entry.get("masked_batches", 0)) for entry in history),
        "processes": processes.count,
    }
    stages.finish(output, "train", wanted, result)
    return result


def _decoder(config: FinetuneConfig, target: Target) -> DecoderWatch | None:
    """What decodes while heads are trained, in the main process."""
    if not config.eval_prompts or not everyone().main:
        return None
    return decoder_watch(
        config, target, TokenData(Path(config.output) / "data", "held_out"), target.backbone.max_length
    )


def with_losses(heads: DraftHeads, config: FinetuneConfig) -> TrainedHeads:
    """Heads with what they are trained by."""
    return TrainedHeads(
        heads,
        depth_decay=config.depth_decay,
        feature_weight=config.feature_weight,
        unroll=config.unroll,
        loss=config.loss,
    )


def start_heads(
    config: FinetuneConfig, backbone: Backbone, counts: torch.Tensor, eos_ids: frozenset[int]
) -> DraftHeads:
    """Heads to begin with, in float32: the identity start, or trained ones.

    Args:
        config: Names the sizes, or the heads to start from.
        backbone: The target.
        counts: Int64 [V], answer tokens of the train split, from which the draft vocabulary is chosen.
        eos_ids: Always in the draft vocabulary.
    """
    sizes = config.heads_config(
        hidden_size=backbone.hidden_size, vocab_size=backbone.vocab_size, target=backbone.config
    )
    if config.init_from is not None:
        heads = given_heads(config.init_from, sizes, backbone)
        return heads if config.adapter_rank is None else _adapted(heads, config)
    ids = None
    if sizes.draft_vocab_size is not None:
        always = [token for token in eos_ids if token < backbone.vocab_size]
        ids = most_frequent(counts, sizes.draft_vocab_size, always=always)
    projection = backbone.projection().rows(ids).to(torch.float32)
    torch.manual_seed(config.seed)  # `low_rank` draws its `down`
    embedding = backbone.embedding().to(torch.float32, projection.weight.device)
    try:
        heads = make_heads(sizes, projection, ids, embedding)
    except ValueError as error:  # MTP heads are made of the target's own layers, which may not lend themselves to it
        raise ConfigError(f"kind {sizes.kind!r} cannot be trained for this target: {error}") from error
    return heads.float().to(projection.weight.device)


def _adapted(heads: DraftHeads, config: FinetuneConfig) -> DraftHeads:
    assert config.adapter_rank is not None
    return adapt_heads(heads, rank=config.adapter_rank, alpha=config.used_adapter_alpha, seed=config.seed)


def check_trained(start: dict[str, torch.Tensor], heads: DraftHeads) -> None:
    """Every head has moved (those that are tied are one), and no tensor is empty or holds what is no number.

    Raises:
        MedusaError: If one has not: it had no target in the data, or no gradient; or if the last step broke weights.
    """
    moved = [False] * heads.num_sets
    for key, tensor in heads.state_dict().items():
        if tensor.numel() == 0:
            raise MedusaError(f"tensor {key} is empty after training")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise MedusaError(f"tensor {key} is not finite after training; lower learning_rate")
        if key.startswith("heads."):
            moved[int(key.split(".")[1])] |= not torch.equal(tensor, start[key])
    if not all(moved):
        raise MedusaError(
            f"every head must have changed, but head {moved.index(False)} did not: no answer in the data is long "
            "enough to give it a target within the draft vocabulary; lower num_heads or give longer answers"
        )


def load_trained(config: FinetuneConfig, backbone: Backbone) -> DraftHeads:
    """The heads of a run's last training, in float32 but rounded to bfloat16, as they will be used; an adapter, which
    is kept in float32, stands around their layers."""
    return read_heads(config, backbone, config.last_training, rounded=True)


def read_heads(config: FinetuneConfig, backbone: Backbone, stage: str, *, rounded: bool) -> DraftHeads:
    """The heads that a training stage left, frozen, in float32.

    Args:
        config: Of the run.
        backbone: The target.
        stage: `train` or `joint`.
        rounded: To bfloat16, as they are saved.
    """
    output = Path(config.output)
    state = read_weights(output / stage / WEIGHTS_NAME)
    if config.adapter_rank is not None:
        heads = _adapted(load_heads(str(config.init_from), backbone, dtype=torch.float32)[0], config)
        load_adapter_tensors(heads, state)
        return heads.requires_grad_(False).eval()
    if rounded:
        state = {
            key: tensor if key == "draft_ids" else tensor.to(torch.bfloat16).float() for key, tensor in state.items()
        }
    sizes = HeadsConfig.from_dict(stages.read_done(output, stage)["result"]["heads"])
    ids = state.get("draft_ids")
    projection = backbone.projection().rows(ids).to(torch.float32)
    heads = make_heads(sizes, projection, ids, backbone.embedding().to(torch.float32, projection.weight.device))
    heads.load_state_dict(state)
    return heads.to(heads.projection.weight.device).requires_grad_(False).eval()


def _batches(config: FinetuneConfig, train: StateStore, heads: DraftHeads) -> StepBatches:
    """What an epoch reads."""
    return step_batches(
        train, attends=heads.attends, batch_positions=config.batch_positions, epochs=1, seed=config.seed
    )


def save_trained(
    folder: Path, heads: DraftHeads, config: MedusaConfig, run: FinetuneConfig, model_card: str | None = None
) -> None:
    """Writes what was trained: heads, with the adapter of their target if it has one, or an adapter of given heads.

    Args:
        folder: As for `save_heads`.
        heads: Of `load_trained`.
        config: Of the heads; what an adapter stands on is added.
        run: Its settings.
        model_card: As for `save_heads`.
    """
    if run.joint:
        adapter = Path(run.output) / "joint" / TARGET_ADAPTER
        copy_adapter(adapter, folder)
        config = replace(config, target_adapter_hash=adapter_hash(adapter))
    if run.adapter_rank is None:
        save_heads(folder, heads, config, model_card)
        return
    given = str(run.init_from)
    base = str(Path(given).resolve()) if Path(given).exists() else given
    save_adapter(folder, heads, replace(config, base_heads=base, base_heads_hash=weights_hash(heads)), model_card)


def _last(history: list[dict[str, float]], key: str) -> dict[str, float]:
    entries = [entry for entry in history if key in entry]
    return (
        {name: value for name, value in entries[-1].items() if name.startswith(("top", "overlap"))} if entries else {}
    )


def coverages(config: FinetuneConfig, heads: DraftHeads) -> dict[str, float]:
    """Which share of the answer tokens heads can guess, of those trained on and of those held out."""
    found = {}
    for name, split in (("draft_coverage", "train"), ("held_out_draft_coverage", "held_out")):
        counts = TokenData(Path(config.output) / "data", split).answer_counts(heads.config.vocab_size)
        found[name] = 1.0 if heads.draft_ids is None else coverage(counts, heads.draft_ids.cpu())
    return found
