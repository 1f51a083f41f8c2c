from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from medusa_spec import MedusaModel
from medusa_spec.checkpoint import packaged_heads, save_heads
from medusa_spec.cli.loading import DEFAULT_HEADS, NO_HEADS, load, load_baseline
from medusa_spec.drafters import HybridDrafter, SuffixCorpus
from medusa_spec.errors import ConfigError, MedusaError
from medusa_spec.target_adapter import adapter_hash, copy_adapter
from medusa_spec.testing import tiny_tokenizer
from medusa_spec.vocabulary import vocabulary_identity


def test_without_heads_drafts_come_from_ngrams_and_it_is_said(tiny_folder: Path) -> None:
    loaded = load(str(tiny_folder), None, None)
    assert loaded.note == NO_HEADS
    assert loaded.model.drafter.name == "ngram"
    assert loaded.labels["drafter"] == "ngram" and loaded.labels["heads"] is None


def test_an_asked_for_drafter_needs_no_note(tiny_folder: Path) -> None:
    loaded = load(str(tiny_folder), None, "ngram")
    assert loaded.note == "" and loaded.model.drafter.name == "ngram"


def test_hybrid_is_look_up_alone_where_there_are_no_heads(tiny_folder: Path) -> None:
    loaded = load(str(tiny_folder), None, "hybrid")
    assert loaded.note == "" and loaded.model.drafter.name == "suffix" and loaded.labels["drafter"] == "hybrid"


def test_a_corpus_is_looked_up_in_beside_heads_and_without(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    SuffixCorpus(folder, identity=vocabulary_identity(tiny_tokenizer())).add([range(9)])
    alone = load(str(tiny_folder), None, "suffix", corpus=folder)
    assert alone.model.drafter.corpus.folder == folder and alone.labels["corpus"] == str(folder)
    model = MedusaModel.from_pretrained(tiny_folder)
    save_heads(tmp_path / "heads", model.heads, model.medusa_config)
    both = load(str(tiny_folder), str(tmp_path / "heads"), "hybrid", corpus=folder)
    assert isinstance(both.model.drafter, HybridDrafter) and len(both.model.drafter.suffix.corpus) == 10


def test_a_corpus_that_cannot_be_used_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    for drafter in (None, "heads", "ngram"):
        with pytest.raises(ConfigError, match=f"--corpus: expected --drafter suffix or hybrid .*got {drafter}"):
            load(str(tiny_folder), None, drafter, corpus=tmp_path)
    with pytest.raises(ConfigError, match="found none at"):
        load(str(tiny_folder), None, "suffix", corpus=tmp_path / "none")
    SuffixCorpus(tmp_path / "corpus", identity="other").add([range(9)])
    with pytest.raises(ConfigError, match="holds ids of the tokenizer 'other'"):
        load(str(tiny_folder), None, "suffix", corpus=tmp_path / "corpus")


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
    loaded.model.detach()
    assert load(None, None, "hybrid").model.drafter.name == ("hybrid" if has_heads else "suffix")


def test_the_baseline_of_heads_with_an_adapted_target_is_the_adapted_target(tiny_folder: Path, tmp_path: Path) -> None:
    peft = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_folder),
        LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False),
    )
    peft.save_pretrained(tmp_path / "lora", save_embedding_layers=False)
    model = MedusaModel.from_pretrained(tiny_folder)
    copy_adapter(tmp_path / "lora", tmp_path / "heads")
    config = replace(model.medusa_config, target_adapter_hash=adapter_hash(tmp_path / "lora"))
    save_heads(tmp_path / "heads", model.heads, config)
    loaded = load(str(tmp_path / "heads"), None, None)
    baseline = load_baseline(loaded.model)
    ids = torch.arange(5, 15)[None]
    assert torch.equal(baseline(ids).logits, loaded.model.target(ids).logits)
    assert not torch.equal(baseline(ids).logits, model.target(ids).logits)
