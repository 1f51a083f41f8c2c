"""A tiny chat model on disk, 200 conversations, and one finished run of all stages that tests may read."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_spec.finetune.config import FinetuneConfig
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
