"""Chances of a draft are calibrated by the truths of stored states."""

import pytest
import torch

from medusa_spec.finetune import ranks as ranks_module
from medusa_spec.finetune.chances import TEMPERATURES, measure_chances
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.heads import HeadsConfig, Projection, TokenEmbedding, make_heads

H, V, K = 6, 12, 2


def model_and_batch(scale: float, draft_ids: torch.Tensor | None = None, rows: int = 4000):
    """Fresh Hydra heads, which guess by the LM head from h, over truths drawn from that very distribution."""
    torch.manual_seed(0)
    projection = Projection(weight=torch.randn(V, H))
    config = HeadsConfig(
        hidden_size=H,
        vocab_size=V,
        kind="hydra",
        num_heads=K,
        draft_vocab_size=None if draft_ids is None else len(draft_ids),
    )
    embedding = TokenEmbedding(weight=torch.randn(V, H))
    heads = make_heads(config, projection.rows(draft_ids), draft_ids, embedding)
    h = torch.randn(rows, H)
    truths = torch.multinomial((projection(h) / scale).softmax(-1), K + 1, replacement=True)
    return TrainedHeads(heads, depth_decay=1.0), {"h": h, "targets": truths.to(torch.int32)}


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5, 2.0])
def test_the_temperature_is_that_of_the_truths(temperature: float) -> None:
    model, batch = model_and_batch(temperature)
    found = measure_chances(model, [batch]).temperature
    place = TEMPERATURES.index(temperature)
    assert found in TEMPERATURES[max(0, place - 1) : place + 2]


def test_coverage_is_the_share_of_truths_in_the_draft_vocabulary() -> None:
    ids = torch.tensor([0, 3, 4, 7, 9])
    model, batch = model_and_batch(1.0, ids)
    inside = torch.isin(batch["targets"][:, 1:], ids)
    assert measure_chances(model, [batch]).coverage == pytest.approx(float(inside.float().mean()))
    assert measure_chances(model_and_batch(1.0)[0], [batch]).coverage == 1.0


def test_hit_is_the_first_guesss_share_below_right_ones() -> None:
    model, batch = model_and_batch(1.0)
    logits = model.heads(batch["h"], batch["targets"][:, :-1].long())
    right = (logits[1].argmax(1) == batch["targets"][:, 2]).float().mean()
    assert measure_chances(model, [batch]).hit == pytest.approx(float(right), abs=1e-6)


def test_positions_without_a_target_count_for_nothing() -> None:
    model, batch = model_and_batch(1.0, rows=200)
    before = measure_chances(model, [batch])
    longer = {"h": torch.cat([batch["h"], torch.randn(50, H)])}
    longer["targets"] = torch.cat([batch["targets"], torch.full((50, K + 1), -100, dtype=torch.int32)])
    assert measure_chances(model, [longer]) == before


def parallel_model_and_batch(rows: int = 6000):
    """Fresh Medusa heads, which guess by the LM head from h, over truths that follow it where the first one was
    guessed, and follow nothing elsewhere."""
    torch.manual_seed(0)
    projection = Projection(weight=torch.randn(V, H))
    heads = make_heads(HeadsConfig(hidden_size=H, vocab_size=V, num_heads=K), projection)
    h = torch.randn(rows, H)
    chances = projection(h).softmax(-1)
    truths = torch.multinomial(chances, K + 1, replacement=True)
    ranks = (chances > chances.gather(1, truths[:, 1:2])).sum(1)
    truths[ranks >= 2, 2] = torch.randint(V, (int((ranks >= 2).sum()),))
    return TrainedHeads(heads, depth_decay=1.0), {"h": h, "targets": truths.to(torch.int32)}, ranks


def test_parallel_heads_count_where_those_before_had_the_truth_among_their_guesses() -> None:
    model, batch, ranks = parallel_model_and_batch()
    inside = {name: tensor[ranks < 2] for name, tensor in batch.items()}
    found = measure_chances(model, [batch], width=2)
    assert found.temperature == 1.0 < measure_chances(model, [batch]).temperature
    assert found.hit == pytest.approx(measure_chances(model, [inside]).hit)
    assert found.hit > measure_chances(model, [batch]).hit


def test_batches_in_pieces_are_counted_as_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, _ = parallel_model_and_batch(500)
    whole = measure_chances(model, [batch], width=2)
    monkeypatch.setattr(ranks_module, "CHUNK_ELEMENTS", 90 * V)
    assert measure_chances(model, [batch], width=2) == whole


def test_sequential_heads_count_everywhere() -> None:
    model, batch = model_and_batch(1.0)
    assert measure_chances(model, [batch], width=1) == measure_chances(model, [batch])
