"""medusa-spec bench: measures tree decoding on the user's machine, model and prompts."""

import sys
from pathlib import Path
from typing import Any

from medusa_spec.cli.loading import load, load_baseline
from medusa_spec.comparison import Comparison
from medusa_spec.errors import ConfigError
from medusa_spec.measure import compare
from medusa_spec.prompts import packaged_prompts, read_prompts


def bench(
    *,
    model: str | None = None,
    heads: str | None = None,
    drafter: str | None = None,
    corpus: Path | None = None,
    prompts: Path | None = None,
    limit: int | None = None,
    per_category: int | None = None,
    max_new_tokens: int = 128,
    draft_nodes: int | None = None,
    speculation: str | None = None,
    dtype: str = "auto",
    seed: int = 0,
    chat_template: bool = True,
    baseline: bool = True,
    temperature: float = 0.0,
) -> Comparison:
    """Load, decode every prompt by every arm, and give the comparison. Progress to standard error.

    Args:
        model: Folder or hub id; None means the default model.
        heads: Folder, packaged name or hub id; None lets the model say, else n-gram look-up.
        drafter: Name of another drafter.
        corpus: Folder of texts for the drafters "suffix" and "hybrid".
        prompts: JSON lines; None means the packaged ones.
        limit: Decode so many prompts, taken in turn from all categories.
        per_category: Decode at most so many of each category.
        max_new_tokens: Per prompt and turn.
        draft_nodes: Most draft nodes per pass.
        speculation: "auto" or "fixed"; None is the library's own choice.
        dtype: Of the weights; "auto" means as they were saved.
        seed: Of the bootstrap, and of sampling.
        chat_template: Whether prompts go through the chat template.
        baseline: Whether Hugging Face's generate on a second load is measured too.
        temperature: At which all arms sample; 0 is greedy decoding.
    """
    if not temperature >= 0:
        raise ConfigError(f"temperature must be 0 (greedy) or more, got {temperature}")
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature else {}
    path = packaged_prompts() if prompts is None else prompts
    asked = read_prompts(path, limit=limit, per_category=per_category)
    loaded = load(model, heads, drafter, dtype=dtype, corpus=corpus)
    if loaded.note:
        print(loaded.note, file=sys.stderr)
    return compare(
        loaded.model,
        load_baseline(loaded.model) if baseline else None,
        loaded.tokenizer,
        asked,
        max_new_tokens=max_new_tokens,
        draft_nodes=draft_nodes,
        speculation=speculation,
        chat_template=chat_template,
        seed=seed,
        labels=loaded.labels | {"prompts": path.name},
        on_prompt=_progress,
        **sampling,
    )


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\rprompt {done} of {of}", end="\n" if done == of else "", file=sys.stderr)
    elif done == of or done % 10 == 0:
        print(f"prompt {done} of {of}", file=sys.stderr)
