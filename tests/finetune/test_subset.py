"""Nested parts of a store."""

from pathlib import Path

import pytest
import torch

from medusa_spec.finetune.batches import step_batches
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.store import StateStore
from medusa_spec.finetune.subset import SubsetStore, answer_counts, answer_tokens, nested_subsets
from medusa_spec.finetune.tokens import TokenData


def test_a_smaller_subset_is_part_of_every_larger_one() -> None:
    tokens = torch.randint(1, 30, (50,)).tolist()
    sizes = [1, 40, 41, 300, 10_000]
    found = nested_subsets(tokens, sizes, seed=3)
    for small, large in zip(found, found[1:], strict=False):
        assert not (small & ~large).any()
    totals = [int(torch.tensor(tokens)[kept].sum()) for kept in found]
    assert found[0].sum() == 1 and found[-1].all()
    assert all(total >= size for size, total in zip(sizes[:-1], totals, strict=False))
    assert all(total < size + 30 for size, total in zip(sizes[:-1], totals, strict=False))


def test_the_same_seed_draws_the_same_conversations() -> None:
    tokens = [7] * 40
    one, two, other = (nested_subsets(tokens, [70], seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_a_subset_of_all_conversations_is_the_store(finished: FinetuneConfig) -> None:
    whole = StateStore(Path(finished.output), "train", 3)
    kept = torch.ones(len(TokenData(Path(finished.output) / "data", "train")), dtype=torch.bool)
    assert torch.equal(SubsetStore(Path(finished.output), "train", 3, kept).decoding_rows(), whole.decoding_rows())


@pytest.mark.parametrize("attends", [False, True])
def test_batches_of_a_subset_hold_its_answers_and_no_others(
    attends: bool, make_store: "type[StateStore]", tmp_path: Path
) -> None:
    masks = [[False, False, True, True, True]] * 3 + [[False, True, True, True]] * 5
    make_store(tmp_path, masks)
    kept = torch.tensor([True, False, False, True, False, False, False, True])
    store = SubsetStore(tmp_path, "train", 3, kept)
    batches = step_batches(store, attends=attends, batch_positions=6, epochs=1, seed=0)
    data = TokenData(tmp_path / "data", "train")
    expected = torch.cat([c.input_ids[c.mask] for c, keep in zip(data, kept, strict=True) if keep])
    found = torch.cat([batch["targets"][..., 0].flatten() for batch in map(batches.__getitem__, range(len(batches)))])
    assert torch.equal(found[found >= 0].sort().values, expected.sort().values)


def test_answer_counts_of_all_are_those_of_the_data(finished: FinetuneConfig) -> None:
    data = TokenData(Path(finished.output) / "data", "train")
    kept = torch.ones(len(data), dtype=torch.bool)
    assert torch.equal(answer_counts(data, kept, 300), data.answer_counts(300))
    assert sum(answer_tokens(data)) == int(data.answer_counts(300).sum())
    kept[1:] = False
    assert int(answer_counts(data, kept, 300).sum()) == answer_tokens(data)[0]
