"""Shows which tokens of a few conversations are trained on. Trains nothing, writes nothing."""

import sys
from itertools import islice

from medusa_spec.finetune.chat import render
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data import HasTokenizer
from medusa_spec.finetune.records import select
from medusa_spec.finetune.target import Target

COLOUR = ("\x1b[32;1m", "\x1b[0m")
BRACKETS = ("⟦", "⟧")


def preview(
    config: FinetuneConfig, *, limit: int = 3, colour: bool | None = None, target: HasTokenizer | None = None
) -> str:
    """The first conversations with the trained tokens marked, and how many of how many they are.

    ```
    <|im_start|>assistant
    ⟦Hello there.<|im_end|>⟧
    ```

    Args:
        config: Model and data.
        limit: Number of conversations.
        colour: Mark by colour instead of brackets; None does so on a terminal.
        target: Has the tokenizer; None loads that of `config.model`.
    """
    target = target or Target(config)
    opening, closing = COLOUR if (sys.stdout.isatty() if colour is None else colour) else BRACKETS
    blocks = []
    for record in islice(select(config.data, config.sources), limit):
        rendered = render(record, target.tokenizer, target.eos_ids)
        ids, mask = rendered.input_ids[: config.max_length], rendered.mask[: config.max_length]
        text, start = "", 0
        while start < len(ids):
            end = next((i for i in range(start, len(ids)) if mask[i] != mask[start]), len(ids))
            piece = str(target.tokenizer.decode(ids[start:end]))
            text += f"{opening}{piece}{closing}" if mask[start] else piece
            start = end
        cut = " (cut)" if len(rendered.input_ids) > len(ids) else ""
        blocks.append(f"--- {record.place}: {sum(mask)} of {len(ids)} tokens trained on{cut}\n{text}")
    return "\n".join(blocks)
