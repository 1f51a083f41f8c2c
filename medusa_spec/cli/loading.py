"""What a command decodes with: model, heads or another drafter, tokenizer, untouched baseline."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from medusa_spec.checkpoint import names_heads, packaged_heads
from medusa_spec.cli.corpus import open_corpus
from medusa_spec.default_model import DEFAULT_MODEL, default_model_path
from medusa_spec.drafters import Drafter, HybridDrafter, SuffixDrafter
from medusa_spec.errors import CheckpointError, ConfigError
from medusa_spec.model import MedusaModel
from medusa_spec.target_adapter import with_adapter
from medusa_spec.vocabulary import vocabulary_identity

DEFAULT_HEADS = "smollm2-135m"
CORPUS_DRAFTERS = ("suffix", "hybrid")
NO_HEADS = "No heads were given: drafts come from n-gram look-up in the text itself (no training)."
NO_PACKAGED_HEADS = (
    "The package carries no trained heads for the default model: drafts come from n-gram look-up "
    "in the text itself (no training)."
)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A wrapped model, its tokenizer, and what to tell the user about the choice."""

    model: MedusaModel
    tokenizer: PreTrainedTokenizerBase
    labels: dict[str, Any]
    note: str = ""


def load(
    name: str | None,
    heads: str | None,
    drafter: str | None,
    *,
    dtype: str = "auto",
    speculation: str | None = None,
    corpus: Path | None = None,
) -> Loaded:
    """Load the model named (None: the default one) with its heads, or else with n-gram look-up.

    `name` may be a folder of heads, which knows its model; `speculation` is the mode, None the library's own choice.
    """
    if corpus is not None and drafter not in CORPUS_DRAFTERS:
        raise ConfigError(f"--corpus: expected --drafter {' or '.join(CORPUS_DRAFTERS)} beside it, got {drafter}")
    disable_progress_bar()  # loading bars would stand between the lines of text
    path, note = name, ""
    if name is None:
        path = str(default_model_path())
        if heads is None and drafter in (None, "hybrid"):
            heads = DEFAULT_HEADS if DEFAULT_HEADS in packaged_heads() else None
            note = "" if heads or drafter else NO_PACKAGED_HEADS
    elif heads is None and drafter is None and not names_heads(name):
        note = NO_HEADS
    if note:
        drafter = "ngram"
    assert path is not None
    try:
        model = MedusaModel.from_pretrained(
            path, heads=heads, drafter=drafter or "heads", speculation=speculation, dtype=dtype
        )
        tokenizer = AutoTokenizer.from_pretrained(target_name(model))
    except OSError as error:  # what Hugging Face raises for files that are not there
        raise CheckpointError(f"model: expected a folder or a hub id, got {path!r}: {error}") from error
    if corpus is not None:
        _look_up_in(corpus, model.drafter, tokenizer)
    labels: dict[str, Any] = {
        "model": DEFAULT_MODEL if name is None else name,
        "heads": heads,
        "drafter": drafter or "heads",
    }
    if corpus is not None:
        labels["corpus"] = str(corpus)
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        labels=labels,
        note=note,
    )


def _look_up_in(corpus: Path, drafter: Drafter, tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives a drafter the corpus, if it is of the same tokenizer."""
    suffix = drafter.suffix if isinstance(drafter, HybridDrafter) else drafter
    assert isinstance(suffix, SuffixDrafter)
    suffix.corpus = open_corpus(corpus, vocabulary_identity(tokenizer))


def load_baseline(model: MedusaModel) -> PreTrainedModel:
    """A second load of the target, with nothing attached: what its user has today, or with the adapter of the heads."""
    target = model.target
    baseline = AutoModelForCausalLM.from_pretrained(target_name(model), dtype=target.dtype)
    baseline = baseline.to(model.device).eval()
    return baseline if model.target_adapter is None else with_adapter(baseline, model.target_adapter)


def target_name(model: MedusaModel) -> str:
    """The folder or hub id that the target was loaded from."""
    return str(model.target.name_or_path)
