"""Ranks on stored states."""

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.ranks import accuracy, complete_rows, decoding_rows, measure_ranks, rank_of
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.train import load_trained
from medusa_spec.finetune.trained import TrainedHeads


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(-1, 7))
def test_rank_is_the_place_in_a_stable_sort(values: list[int], index: int) -> None:
    index = min(index, len(values) - 1)
    logits = torch.tensor([values], dtype=torch.float32)
    order = sorted(range(len(values)), key=lambda place: (-values[place], place))
    expected = order.index(index) if index >= 0 else -1
    assert rank_of(logits, torch.tensor([index])).tolist() == [expected]


def test_rows_are_those_at_which_decoding_drafts(finished: FinetuneConfig) -> None:
    store = StateStore(Path(finished.output) / "states", "held_out")
    targets = torch.cat(store.targets)
    assert decoding_rows(store).tolist() == [r for r, row in enumerate(targets.tolist()) if row[0] != -100]
    assert complete_rows(store).tolist() == [r for r, row in enumerate(targets.tolist()) if -100 not in row]
    assert 0 < len(complete_rows(store)) < len(decoding_rows(store)) < len(store)


def test_measured_ranks_equal_a_naive_loop(finished: FinetuneConfig) -> None:
    store = StateStore(Path(finished.output) / "states", "held_out")
    heads = load_trained(finished, Target(finished).backbone)
    assert heads.draft_ids is not None
    rows = complete_rows(store)[:40]
    ranks = measure_ranks(TrainedHeads(heads, depth_decay=0.8), store, rows)
    batch = store.rows(rows)
    ids = heads.draft_ids.tolist()
    for t in range(len(rows)):
        logits = heads(batch.h[t].float())
        for k in range(ranks.shape[1]):
            guesses = [ids[i] for i in logits[k].argsort(descending=True, stable=True).tolist()]
            truth = int(batch.targets[t, k + 1])
            assert ranks[t, k] == (guesses.index(truth) if truth in guesses else -1)


def test_accuracy_counts_ranks_below_the_top() -> None:
    ranks = torch.tensor([[0, -1], [4, 5], [5, 0], [1, 1]])
    assert accuracy(ranks, 1) == [0.25, 0.25] and accuracy(ranks, 5) == [0.75, 0.5]
