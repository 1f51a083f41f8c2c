"""A tiny chat model on disk, 200 conversations, and one finished run of all stages that tests may read."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_spec.cli.finetune_app import REPEATABLE
from medusa_spec.files import write_json
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.store import StateStore, kept_positions, shard_path, write_shard
from medusa_spec.finetune.tokens import TokenWriter
from medusa_spec.testing import save_tiny_model

WORDS = "red blue green cat dog house tree sun moon runs sleeps eats finds sees one two three".split()


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Seeded chats of one or two rounds, from two sources."""
    draw = random.Random(seed)

    def words(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(2, most)))

    records = []
    for number in range(count):
        messages = []
        for _ in range(draw.randint(1, 2)):
            messages.append({"role": "user", "content": f"{number}: {words(6)}"})
            messages.append({"role": "assistant", "content": words(12)})
        source = "even" if number % 2 == 0 else "odd"
        records.append({"source": source, "license": "CC0-1.0", "messages": messages})
    return records


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its tokenizer."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), dtype=torch.float32)


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 conversations, a JSON object a line."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in conversations(200)))
    return path


@pytest.fixture(scope="session")
def make_config(tiny_folder: Path, chats: Path) -> Callable[..., FinetuneConfig]:
    """Settings of a small run in the folder given; any may be changed."""

    def make(output: Path, **changes: Any) -> FinetuneConfig:
        values: dict[str, Any] = {
            "model": str(tiny_folder),
            "data": (str(chats),),
            "output": str(output),
            "held_out": 0.1,
            "num_heads": 3,
            "draft_vocab_size": 64,
            "epochs": 2,
            "batch_positions": 512,
            "save_steps": 4,
            "dtype": "float32",
            "device": "cpu",
            "batch_tokens": 1024,
            "shard_positions": 2000,
            "tree_width": 4,
            "max_tree_size": 15,
            "tree_size": 7,
            "report_prompts": 4,
            "report_new_tokens": 12,
            "eval_prompts": 1,
            "eval_new_tokens": 8,
        }
        return FinetuneConfig(**(values | changes))

    return make


@pytest.fixture(scope="session")
def finished(make_config: Callable[..., FinetuneConfig], tmp_path_factory: pytest.TempPathFactory) -> FinetuneConfig:
    """The settings of a run of all stages; nobody may change its folder."""
    from medusa_spec.finetune import run_pipeline

    config = make_config(tmp_path_factory.mktemp("finished") / "run")
    run_pipeline(config)
    return config


def words_of(config: FinetuneConfig, **changes: Any) -> list[str]:
    """A command line of these settings; see `command_line`."""
    default = FinetuneConfig(model="m", data=("d",), output="o").to_dict()
    options = {setting: option for option, setting in REPEATABLE.items()}
    words = ["finetune"]
    for name, value in (config.to_dict() | changes).items():
        if name not in ("model", "data", "output") and value == default[name]:
            continue
        option = "--" + options.get(name, name).replace("_", "-")
        if value is True:
            words.append(option)
            continue
        assert value is not None and value is not False, f"{name} cannot be said"
        several = [f"{key}={item}" for key, item in value.items()] if isinstance(value, dict) else value
        for item in several if isinstance(several, list) else [several]:
            words += [option, str(item)]
    return words


@pytest.fixture(scope="session")
def command_line() -> Callable[..., list[str]]:
    """`command_line(config, **changes)`: the arguments of `medusa-spec` that say the same."""
    return words_of


def build_store(
    output: Path,
    masks: Sequence[Sequence[bool]],
    *,
    whole: bool = True,
    taps: tuple[int, ...] = (),
    num_heads: int = 3,
    per_shard: int = 3,
    hidden: int = 8,
    order: Sequence[int] | None = None,
) -> StateStore:
    """A store of random states over conversations of random tokens; see `make_store`."""
    writer = TokenWriter(output / "data", "train", shard_tokens=40)
    for mask in masks:
        writer.add(torch.randint(1, 50, (len(mask),)).tolist(), list(mask))
    writer.flush()
    write_json(output / "data" / "manifest.json", {"splits": {"train": writer.counts()}})
    if order is None:  # as the states stage reads them
        order = sorted(range(len(masks)), key=lambda number: -len(masks[number]))
    sizes = []
    for shard, start in enumerate(range(0, len(order), per_shard)):
        numbers = order[start : start + per_shard]
        places = [kept_positions(torch.tensor(masks[number], dtype=torch.bool), whole=whole) for number in numbers]
        counts = torch.tensor([len(kept) for kept in places])
        columns = {
            "h": torch.randn(int(counts.sum()), hidden).bfloat16(),
            "conversation": torch.tensor(numbers).repeat_interleave(counts).to(torch.int32),
            "position": torch.cat(places).to(torch.int32),
        }
        if taps:
            columns["layers"] = torch.randn(int(counts.sum()), len(taps), hidden).bfloat16()
        write_shard(shard_path(output / "states", "train", shard), columns)
        sizes.append(int(counts.sum()))
    manifest = {"hidden_size": hidden, "whole": whole, "taps": list(taps), "splits": {"train": sizes}}
    write_json(output / "states" / "manifest.json", manifest)
    return StateStore(output, "train", num_heads)


@pytest.fixture(scope="session")
def make_store() -> Callable[..., StateStore]:
    """`make_store(folder, masks, whole=..., taps=...)`: a store over conversations with these masks."""
    return build_store
