"""The states stage: the frozen target reads the data once, and its hidden states are kept."""

import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm

from medusa_spec.backbone import TargetStates
from medusa_spec.files import write_json
from medusa_spec.finetune import stages
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data import SPLITS
from medusa_spec.finetune.dumps import dump_name
from medusa_spec.finetune.known import Known, known_states
from medusa_spec.finetune.processes import everyone
from medusa_spec.finetune.store import kept_positions, read_shard, shard_path, write_shard
from medusa_spec.finetune.target import compute_dtype
from medusa_spec.finetune.tokens import Conversation, TokenData
from medusa_spec.finetune.wanted import Wanted, wanted_states
from medusa_spec.finetune.weights import weights_name

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

    @property
    def config(self) -> Any:
        """Config of its decoder."""
        ...

    def states(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, *, taps: tuple[int, ...] = ()
    ) -> TargetStates:
        """Ids [B, T] to h, the tensor that enters the LM head, and the inputs of tapped layers."""
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
    found = {
        "data": stages.read_done(Path(config.output), "data")["hash"],
        **asdict(wanted_states(config)),
        "dtype": str(compute_dtype(config)),
        "batch_tokens": config.batch_tokens,
        "shard_positions": config.shard_positions,
        **{key: name for key, name in (("weights", weights_name(config)),) if name is not None},
    }
    if config.states_from is not None:
        found["states_from"] = stages.read_done(Path(config.states_from), "states")["hash"]
    if config.states_dump is not None:
        found["states_dump"] = dump_name(config.states_dump)
    if config.keep_states:
        found["keep_states"] = True
    return found


def run_states(config: FinetuneConfig, target: HasBackbone) -> dict[str, Any]:
    """Runs the stage or what is left of it; under a launcher every process reads shards of its own.

    Which conversations share a batch and a shard follows from the data and the settings alone, so that a run that was
    killed and taken up again leaves the same bits as one that was not.

    Args:
        config: Output folder and sizes.
        target: Has the frozen target's backbone, which is not asked for if all is done.

    Returns:
        The manifest, which also lies in `states/manifest.json`.
    """
    output, chosen, processes = Path(config.output), settings(config), everyone()
    done = stages.begin(output, "states", chosen, younger=("weights",))
    processes.wait()
    if done:
        return dict(stages.read_done(output, "states")["result"])
    folder, wanted = output / "states", wanted_states(config)
    folder.mkdir(exist_ok=True)
    data = {split: TokenData(output / "data", split) for split in SPLITS}
    known = known_states(config, data, target, whole=wanted.whole, taps=wanted.taps)
    plans = {split: plan_shards(data[split], config, whole=wanted.whole) for split in SPLITS}
    total = sum(sum(data[split].lengths()) for split in SPLITS)
    with tqdm(total=total, unit="tok", unit_scale=True, desc="states", disable=not processes.main) as bar:
        work = [(split, number, plan) for split in SPLITS for number, plan in enumerate(plans[split])]
        for split, number, plan in processes.share(work[::-1] if config.reverse else work):
            path = shard_path(folder, split, number)
            if _complete(path, plan):
                bar.update(sum(len(data[split][c].input_ids) for batch in plan.batches for c in batch))
            else:
                extract_shard(path, plan, data[split], target, wanted, bar, known)
    processes.wait()
    manifest = {
        "hidden_size": read_shard(shard_path(folder, "train", 0))["h"].shape[1],
        **asdict(wanted),
        "splits": {split: [plan.positions for plan in plans[split]] for split in SPLITS},
        "padding": {split: round(padding(data[split].lengths(), plans[split]), 4) for split in SPLITS},
        "settings": chosen,
    }
    if known is not None:
        manifest["conversations_from"] = known.counts(list(data.values()))
    if processes.main:
        write_json(folder / "manifest.json", manifest)
        stages.finish(output, "states", chosen, manifest)
    return manifest


def plan_shards(data: TokenData, config: FinetuneConfig, *, whole: bool = False) -> list[ShardPlan]:
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
        positions += sum(len(kept_positions(data[number].mask, whole=whole)) for number in batch)
        if positions >= config.shard_positions:
            plans.append(ShardPlan(batches=tuple(batches), positions=positions))
            batches, positions = [], 0
    if batches:
        plans.append(ShardPlan(batches=tuple(batches), positions=positions))
    return plans


def padding(lengths: list[int], plans: list[ShardPlan]) -> float:
    """Share of the tokens of all passes that fill up shorter rows."""
    widths = [(len(batch), max(lengths[number] for number in batch)) for plan in plans for batch in plan.batches]
    return 1.0 - sum(lengths) / sum(rows * width for rows, width in widths)


def extract_shard(
    path: Path,
    plan: ShardPlan,
    data: TokenData,
    target: HasBackbone,
    wanted: Wanted,
    bar: "tqdm[Any]",
    known: Known | None = None,
) -> None:
    """Reads the target's states for one shard, or takes those that are known, and writes it."""
    parts: list[dict[str, torch.Tensor]] = []
    for batch in plan.batches:
        began = time.perf_counter()
        tokens = sum(len(data[number].input_ids) for number in batch)
        found = {} if known is None else {number: known.find(data[number]) for number in batch}
        unknown = [number for number in batch if found.get(number) is None]
        parts += [_named(number, part) for number, part in found.items() if part is not None]
        if unknown:
            parts += _read(unknown, [data[number] for number in unknown], target, wanted)
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - began):.0f} tok/s in this pass")
        bar.update(tokens)
    write_shard(path, {name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def _read(
    numbers: list[int], conversations: list[Conversation], target: HasBackbone, wanted: Wanted
) -> list[dict[str, torch.Tensor]]:
    """Columns of conversations, by one pass of the target."""
    ids = torch.nn.utils.rnn.pad_sequence([c.input_ids.long() for c in conversations], batch_first=True)
    # Padding stands on the right, where no real token of a causal model sees it: no mask is needed.
    states = target.backbone.states(ids.to(target.backbone.device), None, taps=wanted.taps)
    parts = []
    for row, (number, conversation) in enumerate(zip(numbers, conversations, strict=True)):
        places = kept_positions(conversation.mask, whole=wanted.whole)
        part = {"h": states.h[row].to("cpu", STORED_DTYPE)[places], "position": places.to(torch.int32)}
        if states.layers is not None:
            part["layers"] = states.layers[row].to("cpu", STORED_DTYPE)[places]
        parts.append(_named(number, part))
    return parts


def _named(number: int, part: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return part | {"conversation": torch.full((len(part["h"]),), number, dtype=torch.int32)}


def _complete(path: Path, plan: ShardPlan) -> bool:
    """Shards are renamed into place when whole, so one that is there was finished."""
    return path.exists() and len(read_shard(path)["h"]) == plan.positions
