"""The order of the training batches."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_spec.finetune import batches
from medusa_spec.finetune.batches import LENGTH_STEP, PositionBatches, TextBatches, in_order, step_batches
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.store import StateStore

MakeStore = Callable[..., StateStore]
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=14)


def make(config: FinetuneConfig, seed: int = 0) -> PositionBatches:
    return PositionBatches(StateStore(Path(config.output), "train", 3), batch_positions=300, epochs=3, seed=seed)


def of_lengths(
    make_store: MakeStore, factory: pytest.TempPathFactory, lengths: list[int], order: list[int] | None = None
) -> StateStore:
    """A store of whole texts of these lengths, every third token a prompt's; behind each stands the last one chosen."""
    masks = [[*(place % 3 > 0 for place in range(length)), True] for length in lengths]
    return make_store(factory.mktemp("store"), masks, taps=(1,), order=order)


@pytest.mark.parametrize("window", [1, 2, 32])
def test_every_epoch_reads_every_drafting_row_once(
    finished: FinetuneConfig, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(batches, "WINDOW_SHARDS", window)
    data = make(finished)
    wanted = data.store.decoding_rows().tolist()
    orders = [torch.cat(data.order(epoch)).tolist() for epoch in range(3)]
    assert all(sorted(order) == wanted for order in orders)
    assert orders[0] != orders[1] != wanted
    assert all(len(numbers) <= 300 for numbers in data.order(0)) and len(data.order(0)) == -(-len(wanted) // 300)


def test_a_step_is_a_function_of_seed_and_number(finished: FinetuneConfig) -> None:
    one, two = make(finished), make(finished)
    assert len(one) == 3 * one.steps_per_epoch
    list(map(one.__getitem__, range(len(one))))
    for step in (0, one.steps_per_epoch, len(one) - 1):
        assert all(torch.equal(one[step][key], two[step][key]) for key in ("h", "targets"))
    assert not torch.equal(make(finished, seed=1)[0]["targets"], one[0]["targets"])


def test_batches_hold_the_rows_of_the_order(finished: FinetuneConfig) -> None:
    data = make(finished)
    read = torch.cat([data[step]["targets"] for step in range(data.steps_per_epoch)])
    assert torch.equal(read, data.store.rows(torch.cat(data.order(0))).targets)


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 200), st.integers(0, 3))
def test_every_epoch_reads_every_text_once_in_as_many_steps_and_no_batch_is_too_large(
    tmp_path_factory: pytest.TempPathFactory, make_store: MakeStore, lengths: list[int], positions: int, seed: int
) -> None:
    store = of_lengths(make_store, tmp_path_factory, lengths)
    data = TextBatches(store, batch_positions=positions, epochs=3, seed=seed)
    for epoch in range(3):
        order = data.order(epoch)
        assert len(order) == data.steps_per_epoch
        assert sorted(torch.cat(order).tolist()) == list(range(len(lengths)))
        for numbers in order:
            padded = len(numbers) * max(data.texts[number].length for number in numbers.tolist())
            assert len(numbers) == 1 or padded <= positions


@settings(max_examples=20)
@given(LENGTHS, st.integers(1, 200), st.data())
def test_a_step_of_texts_is_a_function_of_seed_and_number(
    tmp_path_factory: pytest.TempPathFactory,
    make_store: MakeStore,
    lengths: list[int],
    positions: int,
    data: st.DataObject,
) -> None:
    """Whatever was read before: so a resumed run reads the same."""
    store = of_lengths(make_store, tmp_path_factory, lengths)
    one, two = (TextBatches(store, batch_positions=positions, epochs=2, seed=5) for _ in range(2))
    whole = [one[step] for step in range(len(one))]
    for step in data.draw(st.lists(st.integers(0, len(one) - 1), max_size=5)):
        again = two[step]
        assert again.keys() == whole[step].keys() == {"h", "targets", "tokens", "layers"}
        assert all(torch.equal(again[name], whole[step][name]) for name in again)


def test_texts_of_a_batch_are_of_similar_length_and_orders_differ(
    tmp_path_factory: pytest.TempPathFactory, make_store: MakeStore
) -> None:
    store = of_lengths(make_store, tmp_path_factory, [3 + 5 * place for place in range(40)])
    data = TextBatches(store, batch_positions=400, epochs=2, seed=0)
    orders = [[numbers.tolist() for numbers in data.order(epoch)] for epoch in range(2)]
    assert orders[0] != orders[1]
    other = TextBatches(store, batch_positions=400, epochs=2, seed=1)
    assert [numbers.tolist() for numbers in other.order(0)] != orders[0]
    rows = padded = 0
    for numbers in orders[0]:
        found = [data.texts[number].length for number in numbers]
        rows, padded = rows + sum(found), padded + len(found) * max(found)
    assert padded < 1.2 * rows  # in any order it would be far more
    firsts = [max(data.texts[number].length for number in numbers) for numbers in orders[0]]
    assert firsts not in (sorted(firsts), sorted(firsts, reverse=True))  # long and short texts take turns


def test_a_family_gets_the_batches_that_it_reads(
    tmp_path_factory: pytest.TempPathFactory, make_store: MakeStore
) -> None:
    store = of_lengths(make_store, tmp_path_factory, [9, LENGTH_STEP, 20])
    for attends, kind in ((False, PositionBatches), (True, TextBatches)):
        made = step_batches(store, attends=attends, batch_positions=64, epochs=1, seed=0)
        assert type(made) is kind


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 200), st.booleans(), st.randoms())
def test_in_order_every_decoding_row_is_read_once(
    tmp_path_factory: pytest.TempPathFactory,
    make_store: MakeStore,
    lengths: list[int],
    positions: int,
    attends: bool,
    dice: random.Random,
) -> None:
    order = dice.sample(range(len(lengths)), len(lengths))  # of any length, as where some states were known before
    store = of_lengths(make_store, tmp_path_factory, lengths, order)
    read, states = [], []
    for batch in in_order(store, attends=attends, batch_positions=positions):
        counts = batch["targets"][..., 0].flatten() != -100
        read.append(batch["targets"].flatten(0, -2)[counts])
        states.append(batch["h"].flatten(0, -2)[counts])
        if attends:
            assert len(batch["h"]) == 1 or batch["h"].shape[0] * batch["h"].shape[1] <= positions
        else:
            assert len(batch["h"]) <= positions
    wanted = store.rows(store.decoding_rows())
    assert torch.equal(torch.cat(read) if read else wanted.targets[:0], wanted.targets)
    assert torch.equal(torch.cat(states) if states else wanted.h[:0], wanted.h)


@pytest.mark.parametrize("positions", [16, 40, 200])
def test_padding_is_what_the_batches_of_an_epoch_are_filled_up_by(
    make_store: MakeStore, tmp_path_factory: pytest.TempPathFactory, positions: int
) -> None:
    store = of_lengths(make_store, tmp_path_factory, [3, 30, 31, 17, 18, 16, 5, 44])
    data = TextBatches(store, batch_positions=positions, epochs=1, seed=0)
    read = sum(data[step]["h"].shape[0] * data[step]["h"].shape[1] for step in range(len(data)))
    assert data.padding() == pytest.approx(1 - 164 / read)
    assert data.padding() == 0 if positions == 16 else data.padding() > 0


def test_positions_are_never_filled_up(finished: FinetuneConfig) -> None:
    assert make(finished).padding() == 0


@pytest.mark.parametrize("attends", [False, True])
def test_a_limit_spreads_over_the_store(
    make_store: MakeStore, tmp_path_factory: pytest.TempPathFactory, attends: bool
) -> None:
    store = of_lengths(make_store, tmp_path_factory, [*range(60, 10, -1)])

    def positions(**limit: int) -> list[int]:
        targets = [batch["targets"].flatten(0, -2) for batch in in_order(store, attends=attends, **limit)]
        return [int((part[:, 0] >= 0).sum()) for part in targets]

    whole = sum(positions())
    assert sum(positions(limit=10 * whole)) == whole
    few = sum(positions(limit=whole // 5))
    assert 0.8 * whole / 5 <= few <= 1.2 * whole / 5
    read = [batch["targets"].shape[-2] for batch in in_order(store, attends=True, batch_positions=64, limit=whole // 5)]
    assert max(read) > 50 > 25 > min(read)  # long and short texts


@settings(max_examples=50)
@given(st.integers(0, 200), st.floats(0, 1))
def test_spread_numbers_are_different_and_reach_everywhere(count: int, share: float) -> None:
    numbers = batches._spread(count, share).tolist()
    assert len(numbers) == len(set(numbers)) == min(count, max(1, round(count * share)))
    gaps = [b - a for a, b in zip(numbers, [*numbers[1:], count], strict=True)] if numbers else []
    assert all(0 <= number < count for number in numbers) and (not gaps or max(gaps) - min(gaps) <= 1)
