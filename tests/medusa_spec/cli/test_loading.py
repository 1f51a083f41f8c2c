from pathlib import Path

import pytest
import torch

from medusa_spec.checkpoint import packaged_heads
from medusa_spec.cli.loading import DEFAULT_HEADS, NO_HEADS, load, load_baseline
from medusa_spec.errors import MedusaError


def test_without_heads_drafts_come_from_ngrams_and_it_is_said(tiny_folder: Path) -> None:
    loaded = load(str(tiny_folder), None, None)
    assert loaded.note == NO_HEADS
    assert loaded.model.drafter.name == "ngram"
    assert loaded.labels["drafter"] == "ngram" and loaded.labels["heads"] is None


def test_an_asked_for_drafter_needs_no_note(tiny_folder: Path) -> None:
    loaded = load(str(tiny_folder), None, "ngram")
    assert loaded.note == "" and loaded.model.drafter.name == "ngram"


def test_baseline_is_the_same_model_untouched_in_other_memory(tiny_folder: Path) -> None:
    loaded = load(str(tiny_folder), None, "ngram")
    baseline, target = load_baseline(loaded.model), loaded.model.target
    assert baseline.dtype == target.dtype == torch.float64
    assert baseline.config._attn_implementation != target.config._attn_implementation
    for one, other in zip(baseline.parameters(), target.parameters(), strict=True):
        assert torch.equal(one, other) and one.data_ptr() != other.data_ptr()


def test_dtype_asked_for_is_that_of_both_loads(tiny_folder: Path) -> None:
    loaded = load(str(tiny_folder), None, "ngram", dtype="float32")
    assert loaded.model.target.dtype == load_baseline(loaded.model).dtype == torch.float32


def test_missing_heads_are_named(tiny_folder: Path) -> None:
    with pytest.raises(MedusaError, match="no-such-heads"):
        load(str(tiny_folder), "no-such-heads", None)


@pytest.mark.real
def test_default_model_drafts_with_packaged_heads_if_there_are_any(real_model_path: Path) -> None:
    loaded = load(None, None, None)
    has_heads = DEFAULT_HEADS in packaged_heads()
    assert loaded.model.drafter.name == ("heads" if has_heads else "ngram")
    assert bool(loaded.note) != has_heads
