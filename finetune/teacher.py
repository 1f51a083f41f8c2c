"""The teacher stage: what the target would say at the stored states, as its likeliest tokens. Knows no heads."""

from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm

from medusa_spec.errors import ConfigError
from medusa_spec.finetune import stages
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data import SPLITS
from medusa_spec.finetune.store import UNTRAINED, StateStore, shard_path
from medusa_spec.finetune.teacher_shards import STORED_DTYPE, read_teacher_shard, write_teacher_shard
from medusa_spec.finetune.top_tokens import top_log_probs
from medusa_spec.heads import Projection


class HasProjection(Protocol):
    """What this stage asks of a target: its LM head. `Backbone` has it."""

    def projection(self) -> Projection:
        """The LM head, all V rows."""
        ...


class HasBackbone(Protocol):
    """What holds one: `Target`, which loads the model on first use."""

    @property
    def backbone(self) -> HasProjection:
        """The frozen target."""
        ...


def settings(config: FinetuneConfig) -> dict[str, Any]:
    """What the stage's result depends on."""
    return {
        "states": stages.read_done(Path(config.output), "states")["hash"],
        "top_logits": config.kept_logits,
    }


def run_teacher(config: FinetuneConfig, target: HasBackbone) -> dict[str, Any]:
    """Runs the stage, or what is left of it; does nothing if no logits are to be kept.

    It needs the stored states and the target's LM head alone. So states of any origin will do, those of another run
    and those whose heads first learnt without a teacher: the target does not read the texts again.

    Returns:
        A record: the probability that the kept tokens have together, on the mean, by split.

    Raises:
        ConfigError: If more are to be kept than the target has tokens.
    """
    if not config.kept_logits:
        return {}
    output, wanted = Path(config.output), settings(config)
    if stages.begin(output, "teacher", wanted):
        return dict(stages.read_done(output, "teacher")["result"])
    projection = target.backbone.projection()
    if config.kept_logits > projection.weight.shape[0]:
        raise ConfigError(
            f"top_logits must be at most {projection.weight.shape[0]}, the target's vocabulary, got "
            f"{config.kept_logits}"
        )
    stores = {split: StateStore(output, split, 1) for split in SPLITS}
    result: dict[str, Any] = {"kept_mass": {}}
    with tqdm(total=sum(map(len, stores.values())), unit="pos", unit_scale=True, desc="teacher") as bar:
        for split, store in stores.items():
            mass = 0.0
            for number, h in enumerate(store.h):
                path = shard_path(output / "teacher", split, number)
                if not path.exists():  # renamed into place when whole
                    make_shard(path, store, number, projection, config.kept_logits)
                mass += float(read_teacher_shard(path, len(h))["log_probs"].float().exp().sum())
                bar.update(len(h))
            result["kept_mass"][split] = mass / max(1, len(store.decoding_rows()))
    stages.finish(output, "teacher", wanted, result)
    return result


def make_shard(path: Path, store: StateStore, number: int, projection: Projection, count: int) -> None:
    """Writes the likeliest tokens at the rows of a shard.

    Rows at which the target chose nothing, in prompts, teach nothing: they hold no probability.
    """
    h = store.h[number]
    ids = torch.zeros(len(h), count, dtype=torch.int64)
    log_probs = torch.full((len(h), count), -torch.inf, dtype=STORED_DTYPE)
    chosen = store.targets(store.conversations[number], store.positions[number])[:, 0] != UNTRAINED
    found, values = top_log_probs(h[chosen], projection, count)
    ids[chosen], log_probs[chosen] = found, values.to(STORED_DTYPE)
    write_teacher_shard(path, ids, log_probs)
