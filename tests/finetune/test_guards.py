"""What stops a training, with its cause."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_spec.errors import MedusaError
from medusa_spec.finetune.batches import step_batches
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.guards import SHOWN, Place, check_targets
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.finetune.trainer import train_heads
from medusa_spec.heads import FAMILIES, HeadsConfig, Projection, TokenEmbedding, make_heads

MakeConfig = Callable[..., FinetuneConfig]
MakeStore = Callable[..., StateStore]
K, H, V = 3, 8, 50
MASKS = [[False] * 2 + [True] * length for length in (3, 9, 4, 12, 7, 5, 3, 8, 6)]


@pytest.fixture
def store(make_store: MakeStore, tmp_path: Path) -> StateStore:
    return make_store(tmp_path / "store", MASKS, num_heads=K, hidden=H)


def heads(kind: str = "medusa") -> TrainedHeads:
    config = HeadsConfig(hidden_size=H, vocab_size=V, kind=kind, num_heads=K, num_layers=1)
    made = make_heads(config, Projection(weight=torch.randn(V, H)), None, TokenEmbedding(weight=torch.randn(V, H)))
    return TrainedHeads(made, depth_decay=0.8)


def train(
    model: TrainedHeads, store: StateStore, make_config: MakeConfig, folder: Path, **changes: Any
) -> list[dict[str, float]]:
    config = make_config(folder, **({"batch_positions": 16, "epochs": 1} | changes))
    return train_heads(model, store, store, config, folder)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_a_state_that_is_no_number_is_named_by_conversation_and_position(
    kind: str, accumulation: int, store: StateStore, make_config: MakeConfig, tmp_path: Path
) -> None:
    row = int(store.starts[1]) + 4
    store.h[1] = store.h[1].clone()
    store.h[1][4, 2] = float("inf")
    conversation, position = (int(found) for found in store.where(torch.tensor([row])))
    where = rf"h in the store is not finite in 1 rows.*position {position} of conversation {conversation} \(row {row}\)"
    with pytest.raises(MedusaError, match=f"the loss of head 0 is nan at step .*{where}.*the batch: "):
        train(heads(kind), store, make_config, tmp_path, gradient_accumulation=accumulation)


def test_weights_that_are_no_numbers_are_named(store: StateStore, make_config: MakeConfig, tmp_path: Path) -> None:
    model = heads()
    with torch.no_grad():
        model.heads.heads[1].blocks[0].linear.weight[0, 0] = float("nan")
    message = r"loss of head 1 is nan at step 0: states are finite, but weights are not \(heads.heads.1.*learning_rate"
    with pytest.raises(MedusaError, match=message):
        train(model, store, make_config, tmp_path)


def test_numbers_that_outgrow_their_type_blame_the_learning_rate(
    store: StateStore, make_config: MakeConfig, tmp_path: Path
) -> None:
    store.h = [h * 1e10 for h in store.h]
    with pytest.raises(
        MedusaError, match=r"loss of head . is .* at step 1: .*outgrew float32.*learning_rate, which is"
    ):
        train(heads(), store, make_config, tmp_path, learning_rate=1e30, epochs=4, warmup=0.0)


def test_a_gradient_that_is_no_number_stops_before_it_becomes_a_weight(
    store: StateStore, make_config: MakeConfig, tmp_path: Path
) -> None:
    model = heads()
    next(model.heads.heads[1].parameters()).register_hook(lambda gradient: gradient * float("inf"))
    message = "the gradient of head 1 is (nan|inf) at step 0, although its loss is a number: .*outgrew float32"
    with pytest.raises(MedusaError, match=message):
        train(model, store, make_config, tmp_path)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_batch_is_told_in_a_few_words(store: StateStore) -> None:
    batches = step_batches(store, attends=False, batch_positions=1000, epochs=1, seed=0)
    place = Place(step=3, batches=batches, numbers=batches.numbers(0), learning_rate=0.1)
    assert f"{len(store.decoding_rows())} rows of train conversations 0, 1, 2" in place.words()
    assert f"and {len(MASKS) - SHOWN} more" in place.words()


def test_a_head_that_is_frozen_is_named_at_the_first_step(
    store: StateStore, make_config: MakeConfig, tmp_path: Path
) -> None:
    model = heads()
    model.heads.heads[2].requires_grad_(False)
    with pytest.raises(MedusaError, match=r"every head must get a gradient, but head 2 got none at step 0, from \d+"):
        train(model, store, make_config, tmp_path)


def test_a_head_that_its_loss_does_not_reach_is_named(
    store: StateStore, make_config: MakeConfig, tmp_path: Path
) -> None:
    model = heads()
    for parameter in model.heads.heads[1].parameters():
        parameter.register_hook(torch.zeros_like)
    with pytest.raises(MedusaError, match="head 1 got none at step 0"):
        train(model, store, make_config, tmp_path)


def test_a_head_without_targets_is_named_before_anything_is_trained(
    make_store: MakeStore, make_config: MakeConfig, tmp_path: Path
) -> None:
    short = make_store(tmp_path / "store", [[False, True, True]] * 4, num_heads=K, hidden=H)
    with pytest.raises(MedusaError, match="every head must have targets, but head 1 has none.*lower num_heads"):
        train(heads(), short, make_config, tmp_path)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_targets_are_counted_for_every_head(store: StateStore) -> None:
    expected = torch.tensor([sum(sum(mask) - 1 - k for mask in MASKS if sum(mask) - 1 > k) for k in range(K)])
    for kind in FAMILIES:
        if kind not in ("mtp", "eagle3", "fused"):  # which are made of layers of a target
            assert check_targets(heads(kind), store).equal(expected)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_batch_without_targets_adds_nothing_and_is_counted(
    accumulation: int, store: StateStore, make_config: MakeConfig, tmp_path: Path
) -> None:
    model = heads()
    batches = step_batches(store, attends=False, batch_positions=1, epochs=1, seed=0)
    masked = sum(not model.counts(batches[step]["targets"])[0].any() for step in range(len(batches)))
    assert masked >= len(MASKS)
    history = train(model, store, make_config, tmp_path, batch_positions=1, gradient_accumulation=accumulation)
    assert sum(entry.get("masked_batches", 0) for entry in history) == masked
    assert all(parameter.isfinite().all() for parameter in model.parameters())
