"""medusa-spec demo: a few prompts, plainly and with the tree, then what came of it."""

import sys
from typing import Any

from medusa_spec.cli.loading import Loaded, load, load_baseline
from medusa_spec.cli.show import (
    MarkedStreamer,
    WatchedDrafter,
    accepted_marks,
    explain_marks,
)
from medusa_spec.comparison import Comparison
from medusa_spec.comparison_table import ARM_NAMES, columns
from medusa_spec.excuse import ALLOWANCE, explain
from medusa_spec.machine import quiet_words
from medusa_spec.measure import compare
from medusa_spec.prompts import Prompt, encode, packaged_prompts, read_prompts


def demo(*, heads: str | None, drafter: str | None, limit: int, max_new_tokens: int, baseline: bool) -> None:
    """Decode packaged prompts with the default model before the user's eyes."""
    print("Loading the default model (the first time, it is unpacked: half a minute) …")
    loaded = load(None, heads, drafter)
    if loaded.note:
        print(loaded.note)
    untouched: Any = load_baseline(loaded.model) if baseline else None
    prompts = read_prompts(packaged_prompts(), limit=limit)
    print(f"Marked in the tree's text: {explain_marks(accepted_marks(sys.stdout))}.")
    if untouched is not None:
        print("Hugging Face's generate decodes every prompt, too, unseen.")
    comparison = compare(
        loaded.model,
        untouched,
        loaded.tokenizer,
        prompts,
        max_new_tokens=max_new_tokens,
        labels=loaded.labels,
        watch=_Stage(loaded),
    )
    print(f"\n{summary(comparison)}")
    if untouched is not None:
        print(ties(untouched, loaded, prompts, comparison))


def ties(untouched: Any, loaded: Loaded, prompts: list[Prompt], comparison: Comparison) -> str:
    """What is behind outputs that differ from Hugging Face's: ties that rounding tipped, or a fault."""
    excused, faults, widest = 0, 0, 0.0
    for prompt, record in zip(prompts, comparison.records, strict=True):
        ids = encode(loaded.tokenizer, prompt.messages)["input_ids"]
        found = explain(untouched, ids, record.runs["hf"].tokens, record.runs["tree"].tokens)
        if found is not None:
            excused, faults = excused + found.excused, faults + (not found.excused)
            widest = max(widest, found.gap / found.noise if found.noise else float("inf"))
    if not excused + faults:
        return "every token is the one that Hugging Face's generate gives"
    if faults:
        return f"{faults} outputs differ where rounding does not explain it: please report this as a fault"
    return (
        f"{excused} outputs differ from Hugging Face's, each at a tie within rounding: the two likeliest tokens\n"
        f"lie at most {widest:.1f} times as far apart there as two ways of its own to compute the same\n"
        f"logits (allowed: {ALLOWANCE:.0f}; in float64 all outputs are equal)"
    )


def summary(comparison: Comparison) -> str:
    """The small table at the end."""
    stats = comparison.stats()
    equality = comparison.equality("tree", "plain")
    rows = [["decoding", "tokens/s"]]
    for arm in comparison.arms:
        rows.append([ARM_NAMES[arm], f"{comparison.tokens_per_second(arm):.1f}"])
    lines = [columns(rows), ""]
    for fast, slow in comparison.pairs:
        ratio = comparison.speedup(fast, slow)
        interval = f"95 % interval {ratio.low:.2f} to {ratio.high:.2f}"
        lines.append(f"{fast} / {slow}: {ratio.value:.2f} times the speed ({interval})")
    lines.append(f"same output, tree and plain: {equality.equal} of {equality.of} prompts")
    if "hf" in comparison.arms:
        untouched = comparison.equality("tree", "hf")
        lines.append(f"same output, tree and Hugging Face: {untouched.equal} of {untouched.of} prompts")
    if comparison.machine.get("dtype") in ("bfloat16", "float16"):
        lines.append("(16-bit arithmetic: outputs may part where the two likeliest tokens are as good as tied)")
    lines.append(
        f"mu {stats.mu:.2f} draft tokens accepted per drafted pass, tau {stats.tau:.2f} tokens gained per pass"
    )
    lines.append(quiet_words(comparison.others))
    return "\n".join(lines)


class _Stage:
    """Announces a run and makes its text visible; the untouched baseline runs unseen."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._shown: int | None = None

    def __call__(self, arm: str, index: int, prompt: Prompt) -> dict[str, Any]:
        if self._shown != index:
            asked = " ".join(prompt.messages[-1]["content"].split())
            print(f"\n{prompt.category or 'prompt'}: {asked[:300]}{' …' * (len(asked) > 300)}")
            self._shown = index
        if arm == "hf":
            return {}
        print(f"  {ARM_NAMES[arm]}:")
        marks = accepted_marks(sys.stdout) if arm == "tree" else None
        streamer = MarkedStreamer(self._loaded.tokenizer, marks=marks, indent="    ")
        if arm == "plain":
            return {"streamer": streamer}
        drafter = WatchedDrafter(self._loaded.model.drafter, streamer.drafted)
        return {"streamer": streamer, "drafter": drafter}
