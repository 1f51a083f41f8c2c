"""A step's batch in pieces."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_spec.finetune.batches import StepBatches, step_batches
from medusa_spec.finetune.pieces import Pieces
from medusa_spec.finetune.processes import Processes
from medusa_spec.finetune.store import StateStore, shard_path
from medusa_spec.finetune.teacher_shards import write_teacher_shard
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.heads import FAMILIES, HeadsConfig, Projection, TokenEmbedding, make_heads

MakeStore = Callable[..., StateStore]
K, H, V = 3, 8, 50
MASKS = [[False] * 2 + [True] * length for length in (3, 9, 4, 12, 7, 5, 3, 8, 6)]


def heads(kind: str, loss: str = "cross_entropy", **options: Any) -> TrainedHeads:
    config = HeadsConfig(
        hidden_size=H, vocab_size=V, kind=kind, num_heads=K, num_layers=1, draft_vocab_size=30, options=options
    )
    ids = torch.arange(0, 30) + 5
    projection = Projection(weight=torch.randn(V, H), bias=torch.randn(V))
    made = make_heads(config, projection.rows(ids), ids, TokenEmbedding(weight=torch.randn(V, H)))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return TrainedHeads(made, depth_decay=0.8, feature_weight=0.3 if made.mimics else 0.0, loss=loss).double()


def batches_of(kind: str, store: StateStore, positions: int = 40) -> StepBatches:
    attends = FAMILIES[kind].attends
    return step_batches(store, attends=attends, batch_positions=positions, epochs=2, seed=1)


def pieces(batches: StepBatches, model: TrainedHeads, accumulation: int, count: int) -> list[Pieces]:
    """Of every process."""
    others = [Processes(index=index, count=count) for index in range(count)]
    return [Pieces(batches, model.counts, accumulation=accumulation, processes=process) for process in others]


def gradients(model: TrainedHeads, batches: list[dict[str, torch.Tensor]]) -> tuple[list[torch.Tensor], torch.Tensor]:
    model.zero_grad()
    total = torch.zeros(K)
    for batch in batches:
        out = model(**batch)
        out["loss"].backward()
        total = total + out["losses"]
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None], total


@pytest.mark.parametrize(("accumulation", "count"), [(1, 2), (8, 1), (2, 3), (25, 1)])
@pytest.mark.parametrize(
    ("kind", "options"), [("medusa", {}), ("hydra", {}), ("recurrent", {}), ("eagle", {}), ("eagle3", {"taps": "0,1"})]
)
def test_pieces_add_up_to_the_gradient_and_the_losses_of_the_whole_batch(
    kind: str, options: dict[str, Any], accumulation: int, count: int, make_store: MakeStore, tmp_path: Path
) -> None:
    taps = (0, 1) if options else ()
    model = heads(kind, **options)
    batches = batches_of(kind, make_store(tmp_path, MASKS, taps=taps, num_heads=K, hidden=H))
    for step in (0, len(batches) - 1):
        whole = gradients(model, [batches[step]])
        parts = pieces(batches, model, accumulation, count)
        found = gradients(model, [part[step * accumulation + place] for part in parts for place in range(accumulation)])
        torch.testing.assert_close(found[1].double(), whole[1].double(), rtol=1e-6, atol=1e-6)
        assert len(whole[0]) == len(found[0])
        for one, other in zip(whole[0], found[0], strict=True):
            torch.testing.assert_close(other, one, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
@pytest.mark.parametrize("loss", ["kl", "total_variation", "log_acceptance"])
def test_pieces_add_up_for_losses_that_learn_from_probabilities(
    loss: str, kind: str, make_store: MakeStore, tmp_path: Path
) -> None:
    make_store(tmp_path, MASKS, num_heads=K, hidden=H)
    plain = StateStore(tmp_path, "train", 1)
    for shard, h in enumerate(plain.h):
        probs = torch.rand(len(h), 4).softmax(1) * torch.rand(len(h), 1)
        ids = torch.stack([torch.randperm(V)[:4] for _ in range(len(h))])
        write_teacher_shard(shard_path(tmp_path / "teacher", "train", shard), ids, probs.log())
    store = StateStore(tmp_path, "train", K, teacher=True)
    model, batches = heads(kind, loss), batches_of(kind, store)
    whole = gradients(model, [batches[0]])
    found = gradients(model, [part[place] for part in pieces(batches, model, 3, 2) for place in range(3)])
    for one, other in zip(whole[0], found[0], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
@pytest.mark.parametrize(("accumulation", "count"), [(1, 1), (1, 2), (3, 2), (1, 40)])
def test_every_row_of_a_step_is_read_once_whoever_reads(
    kind: str, accumulation: int, count: int, make_store: MakeStore, tmp_path: Path
) -> None:
    model = heads(kind)
    batches = batches_of(kind, make_store(tmp_path, MASKS, num_heads=K, hidden=H))
    parts = pieces(batches, model, accumulation, count)
    assert all(len(part) == len(batches) * accumulation for part in parts)
    for step in range(len(batches)):
        read = torch.cat([part.part(step, place) for part in parts for place in range(accumulation)])
        assert read.sort().values.equal(batches.numbers(step).sort().values)


def test_pieces_count_as_their_batch_does(make_store: MakeStore, tmp_path: Path) -> None:
    model = heads("hydra")
    batches = batches_of("hydra", make_store(tmp_path, MASKS, num_heads=K, hidden=H))
    whole = model.counts(batches[0]["targets"])
    found = [part[place]["counts"] for part in pieces(batches, model, 2, 2) for place in range(2)]
    assert torch.stack([counts[0] for counts in found]).sum(0).equal(whole)
    assert all(counts[1].equal(whole) for counts in found)


def test_a_batch_in_one_piece_is_read_as_it_is(make_store: MakeStore, tmp_path: Path) -> None:
    model = heads("medusa")
    batches = batches_of("medusa", make_store(tmp_path, MASKS, num_heads=K, hidden=H))
    (whole,) = pieces(batches, model, 1, 1)
    assert whole[1].keys() == batches[1].keys() == {"h", "targets"}
    assert all(torch.equal(whole[1][name], batches[1][name]) for name in batches[1])
