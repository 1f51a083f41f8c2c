"""The states stage: the frozen target reads the data once, and its hidden states are kept."""

import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm

from medusa_spec.files import write_json
from medusa_spec.finetune import stages
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data import SPLITS
from medusa_spec.finetune.reuse import KnownStates
from medusa_spec.finetune.store import make_targets, read_shard, shard_path, wanted_positions, write_shard
from medusa_spec.finetune.target import compute_dtype
from medusa_spec.finetune.tokens import Conversation, TokenData

STORED_DTYPE = torch.bfloat16
"""Half the disk; heads are trained in float32 from it, and in decoding they see a rounded h as well."""


class HiddenStates(Protocol):
    """What this stage asks of a target: `Backbone` has it."""

    @property
    def hidden_size(self) -> int:
        """H."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the target computes."""
        ...

    def hidden_states(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Ids [B, T] to h [B, T, H], the tensor that enters the LM head."""
        ...


class HasBackbone(Protocol):
    """What holds one: `Target`, which loads the model on first use."""

    @property
    def backbone(self) -> HiddenStates:
        """The frozen target."""
        ...


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """One shard: its batches, each a tuple of conversation numbers, and how many positions it keeps."""

    batches: tuple[tuple[int, ...], ...]
    positions: int


def settings(config: FinetuneConfig) -> dict[str, Any]:
    """What the stage's result depends on."""
    wanted = {
        "data": stages.read_done(Path(config.output), "data")["hash"],
        "num_heads": config.num_heads,
        "dtype": str(compute_dtype(config)),
        "batch_tokens": config.batch_tokens,
        "shard_positions": config.shard_positions,
    }
    if config.states_from is not None:
        wanted["states_from"] = stages.read_done(Path(config.states_from), "states")["hash"]
    return wanted


def run_states(config: FinetuneConfig, target: HasBackbone) -> dict[str, Any]:
    """Runs the stage or what is left of it.

    Which conversations share a batch and a shard follows from the data and the settings alone, so that a run that was
    killed and taken up again leaves the same bits as one that was not.

    Args:
        config: Output folder and sizes.
        target: Has the frozen target's backbone, which is not asked for if all is done.

    Returns:
        The manifest, which also lies in `states/manifest.json`.
    """
    output, wanted = Path(config.output), settings(config)
    if stages.begin(output, "states", wanted):
        return dict(stages.read_done(output, "states")["result"])
    folder = output / "states"
    folder.mkdir(exist_ok=True)
    known = None if config.states_from is None else KnownStates(config)
    data = {split: TokenData(output / "data", split) for split in SPLITS}
    plans = {split: plan_shards(data[split], config) for split in SPLITS}
    total = sum(sum(data[split].lengths()) for split in SPLITS)
    with tqdm(total=total, unit="tok", unit_scale=True, desc="states") as bar:
        work = [(split, number, plan) for split in SPLITS for number, plan in enumerate(plans[split])]
        for split, number, plan in reversed(work) if config.reverse else work:
            path = shard_path(folder, split, number)
            if _complete(path, plan):
                bar.update(sum(len(data[split][c].input_ids) for batch in plan.batches for c in batch))
            else:
                extract_shard(path, plan, data[split], target, config.num_heads, bar, known)
    manifest = {
        "hidden_size": read_shard(shard_path(folder, "train", 0))["h"].shape[1],
        "num_heads": config.num_heads,
        "splits": {split: [plan.positions for plan in plans[split]] for split in SPLITS},
        "settings": wanted,
    }
    write_json(folder / "manifest.json", manifest)
    stages.finish(output, "states", wanted, manifest)
    return manifest


def plan_shards(data: TokenData, config: FinetuneConfig) -> list[ShardPlan]:
    """Conversations of similar length share a pass; a shard is closed once it keeps `shard_positions` positions."""
    lengths = data.lengths()
    order = iter(sorted(range(len(data)), key=lambda number: (-lengths[number], number)))
    plans: list[ShardPlan] = []
    batches: list[tuple[int, ...]] = []
    positions = 0
    while first := list(islice(order, 1)):
        # Sorted by falling length: the first one of a batch sets the padded width.
        rows = max(1, config.batch_tokens // max(lengths[first[0]], 1))
        batch = (*first, *islice(order, rows - 1))
        batches.append(batch)
        positions += sum(_kept(data, number, config.num_heads) for number in batch)
        if positions >= config.shard_positions:
            plans.append(ShardPlan(batches=tuple(batches), positions=positions))
            batches, positions = [], 0
    if batches:
        plans.append(ShardPlan(batches=tuple(batches), positions=positions))
    return plans


def extract_shard(
    path: Path,
    plan: ShardPlan,
    data: TokenData,
    target: HasBackbone,
    num_heads: int,
    bar: "tqdm[Any]",
    known: KnownStates | None = None,
) -> None:
    """Reads the target's states for one shard, or takes those that are known, and writes it."""
    parts: list[tuple[torch.Tensor, ...]] = []
    for whole in plan.batches:
        began = time.perf_counter()
        tokens = sum(len(data[number].input_ids) for number in whole)
        batch = [number for number in whole if not _take_known(known, number, data[number], parts)]
        conversations = [data[number] for number in batch]
        if not batch:
            bar.update(tokens)
            continue
        ids = torch.nn.utils.rnn.pad_sequence([c.input_ids.long() for c in conversations], batch_first=True)
        # Padding stands on the right, where no real token of a causal model sees it: no mask is needed.
        states = target.backbone.hidden_states(ids.to(target.backbone.device), None).to("cpu", STORED_DTYPE)
        for row, (number, conversation) in enumerate(zip(batch, conversations, strict=True)):
            targets = make_targets(conversation.input_ids, conversation.mask, num_heads)
            wanted = wanted_positions(targets)
            numbers = torch.full((len(wanted),), number, dtype=torch.int32)
            parts.append((states[row, wanted], targets[wanted], numbers, wanted.to(torch.int32)))
        bar.update(tokens)
        bar.set_postfix_str(f"{tokens / (time.perf_counter() - began):.0f} tok/s in this pass")
    write_shard(path, *(torch.cat(column) for column in zip(*parts, strict=True)))


def _take_known(
    known: KnownStates | None, number: int, conversation: Conversation, parts: list[tuple[torch.Tensor, ...]]
) -> bool:
    """Adds a conversation's known states to `parts`; false if there are none."""
    found = None if known is None else known.find(conversation)
    if found is not None:
        h, targets, positions = found
        parts.append((h, targets, torch.full((len(h),), number, dtype=torch.int32), positions))
    return found is not None


def _kept(data: TokenData, number: int, num_heads: int) -> int:
    conversation = data[number]
    return len(wanted_positions(make_targets(conversation.input_ids, conversation.mask, num_heads)))


def _complete(path: Path, plan: ShardPlan) -> bool:
    """Shards are renamed into place when whole, so one that is there was finished."""
    return path.exists() and len(read_shard(path)["h"]) == plan.positions
