"""Ranks on stored states."""

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.finetune.batches import in_order
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.ranks import accuracy, measure_ranks, rank_of
from medusa_spec.finetune.store import StateStore, make_targets
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.train import load_trained
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.heads import DraftHeads, HeadsConfig, fitted_options, make_heads


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(-1, 7))
def test_rank_is_the_place_in_a_stable_sort(values: list[int], index: int) -> None:
    index = min(index, len(values) - 1)
    logits = torch.tensor([values], dtype=torch.float32)
    order = sorted(range(len(values)), key=lambda place: (-values[place], place))
    expected = order.index(index) if index >= 0 else -1
    assert rank_of(logits, torch.tensor([index])).tolist() == [expected]


def naive_ranks(heads: DraftHeads, store: StateStore, rows: list[int]) -> list[list[int]]:
    """Ranks one row at a time, from whole lists of guesses."""
    assert heads.draft_ids is not None
    ids, found = heads.draft_ids.tolist(), []
    for row in rows:
        batch = store.rows(torch.tensor([row]))
        logits, ranks = heads(batch.h[0].float()), []
        for k in range(heads.config.num_heads):
            guesses = [ids[i] for i in logits[k].argsort(descending=True, stable=True).tolist()]
            truth = int(batch.targets[0, k + 1])
            ranks.append(guesses.index(truth) if truth in guesses else -1)
        found.append(ranks)
    return found


def test_measured_ranks_equal_a_naive_loop_where_every_head_has_a_target(finished: FinetuneConfig) -> None:
    store = StateStore(Path(finished.output), "held_out", 3)
    heads = load_trained(finished, Target(finished).backbone)
    ranks = measure_ranks(TrainedHeads(heads, depth_decay=0.8), in_order(store, attends=False, batch_positions=50))
    every = store.rows(torch.arange(len(store))).targets.tolist()
    complete = [row for row, targets in enumerate(every) if -100 not in targets]
    assert 100 < len(complete) < len(store.decoding_rows())
    assert len(ranks) == len(complete) and ranks[:40].tolist() == naive_ranks(heads, store, complete[:40])
    assert ranks[-20:].tolist() == naive_ranks(heads, store, complete[-20:])


def test_without_a_position_at_which_every_head_has_a_target_all_that_draft_count(finished: FinetuneConfig) -> None:
    model = TrainedHeads(load_trained(finished, Target(finished).backbone), depth_decay=0.8)
    targets = torch.tensor([[5, 6, -100, -100], [-100, 7, 8, 9], [7, -100, -100, -100]], dtype=torch.int32)
    batch = {"h": torch.randn(3, 32), "targets": targets}
    ranks = measure_ranks(model, [batch])
    assert len(ranks) == 2 and ranks[1].tolist() == [-1, -1, -1] and ranks[0, 0] >= 0 > ranks[0, 1]


def test_ranks_on_whole_texts_are_those_of_their_rows(finished: FinetuneConfig) -> None:
    """Heads that attend read the prompts, too; ranks are taken where decoding drafts, padding left out."""
    backbone = Target(finished).backbone
    options = fitted_options("eagle3", {}, backbone.config)
    config = HeadsConfig(hidden_size=32, vocab_size=backbone.vocab_size, kind="eagle3", num_heads=2, options=options)
    heads = make_heads(config, backbone.projection(), None, backbone.embedding()).requires_grad_(False)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ids, lengths = torch.randint(3, 99, (2, 9)), (9, 6)
    states = backbone.states(ids, taps=heads.taps)
    masks = torch.rand(2, 9) < 0.7
    targets = torch.full((2, 9, 3), -100, dtype=torch.int32)
    tokens = torch.zeros(2, 9, 2, dtype=torch.int64)
    for row, length in enumerate(lengths):
        targets[row, :length] = make_targets(ids[row, :length], masks[row, :length], 2)
        for t in range(length):
            tokens[row, t] = torch.cat([ids[row, t + 1 : min(t + 3, length)], torch.zeros(2, dtype=torch.int64)])[:2]
    batch = {"h": states.h, "layers": states.layers, "targets": targets, "tokens": tokens}
    ranks = measure_ranks(TrainedHeads(heads, depth_decay=1.0), [batch])
    expected = []
    for row, length in enumerate(lengths):
        alone = heads.features(
            states.h[row : row + 1, :length], tokens[row : row + 1, :length], states.layers[row : row + 1, :length]
        )
        for t in range(length):
            if -100 not in targets[row, t]:
                logits = [heads.head(k).logits(z[0, t], heads.projection) for k, z in enumerate(alone)]
                truth = targets[row, t, 1:].tolist()
                expected.append(
                    [int((scores > scores[true]).sum()) for scores, true in zip(logits, truth, strict=True)]
                )
    assert len(expected) > 2 and ranks.tolist() == expected


def test_accuracy_counts_ranks_below_the_top() -> None:
    ranks = torch.tensor([[0, -1], [4, 5], [5, 0], [1, 1]])
    assert accuracy(ranks, 1) == [0.25, 0.25] and accuracy(ranks, 5) == [0.75, 0.5]
