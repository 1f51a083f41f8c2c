"""The self stage, for `data=("self",)`: the model writes prompts from its template's user turn, and answers them.

Source: Xu et al. 2024, "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing".
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from medusa_spec.batch import Sampling
from medusa_spec.errors import DataError
from medusa_spec.finetune import stages
from medusa_spec.finetune import written as kept
from medusa_spec.finetune.choices import SELF
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.jsonl import Object, in_shards, write_objects
from medusa_spec.finetune.target import MARKS, Target, target_marks
from medusa_spec.finetune.writer import Prompt, Writer

SHARD = 256
"""Conversations asked for per shard: what a kill can cost."""

PROMPT_TOKENS = 256
PROMPTS = Sampling(temperature=1.0, top_k=1024, top_p=0.95)
MARK = "MEDUSA-SPEC-PROMPT"


def settings(config: FinetuneConfig, target: Target) -> dict[str, Any]:
    """What the stage's result depends on."""
    return {
        "model": config.model,
        "revision": config.revision,
        "conversations": config.self_conversations,
        "new_tokens": config.self_new_tokens,
        "openings": config.self_openings,
        "temperature": config.distil_temperature,
        "batch": config.distil_batch,
        "max_length": config.max_length,
        "seed": config.seed,
        "dtype": str(target.dtype),
        **target_marks(config, target),
        **kept.settings(config),
    }


def run_self(config: FinetuneConfig, target: Target) -> dict[str, Any]:
    """Writes `self.jsonl`, in shards, so that a run that was stopped goes on; does nothing if other data are given.

    Raises:
        DataError: If the model has no chat template, or wrote nothing that can be used.
    """
    if config.data != (SELF,):
        return {}
    output, wanted = Path(config.output), settings(config, target)
    if stages.begin(output, "self", wanted, younger=MARKS):
        return dict(stages.read_done(output, "self")["result"])
    opening = user_opening(target)
    with Writer(config, target, kept.keep_of(config)) as writer:
        records = in_shards(
            output / "self",
            "self",
            -(-config.self_conversations // SHARD),
            lambda number: write_shard(config, writer, opening, number),
        )
    unique = list({record["messages"][0]["content"]: record for record in reversed(records)}.values())[::-1]
    if not unique:
        raise DataError(f"the model {config.model!r} wrote no prompt that ends by itself; give data instead")
    write_objects(output / "self.jsonl", unique)
    result = {
        "conversations": len(unique),
        "asked": config.self_conversations,
        "loops": sum(r["loops"] for r in unique),
    }
    stages.finish(output, "self", wanted, result)
    return result


def user_opening(target: Target) -> str:
    """What the chat template puts before the user's first words.

    Raises:
        DataError: If there is no template, or it does not show the words as they are.
    """
    if target.tokenizer.chat_template is None:
        raise DataError("data = 'self' needs a tokenizer with a chat template, but it has none; give data instead")
    if not target.eos_ids:
        raise DataError("data = 'self' needs a model with an end-of-sequence token, but it has none; give data instead")
    text = target.tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    before, found, _ = str(text).partition(MARK)
    if not found:
        raise DataError("the chat template does not show the user's words as they are; give data instead of 'self'")
    return before


def write_shard(config: FinetuneConfig, writer: Writer, opening: str, number: int) -> list[Object]:
    """Conversations of one shard: prompts sampled behind the openings in turn, and answers to those that ended."""
    first, openings = number * SHARD, config.self_openings or ("",)
    asked = range(first, min(first + SHARD, config.self_conversations))
    begun = {place: openings[place % len(openings)] for place in asked}
    prompts = [Prompt(key=place, text=opening + words, seed=("self", place)) for place, words in begun.items()]
    written = {text.key: text for text in writer.write(prompts, PROMPT_TOKENS, PROMPTS) if text.finished}
    asks = {place: (words + written[place].text).strip() for place, words in begun.items() if place in written}
    asks = {place: words for words, place in {words: place for place, words in reversed(asks.items()) if words}.items()}
    chats = [
        Prompt(key=place, text=writer.chat([{"role": "user", "content": asks[place]}]), seed=("answer", place))
        for place in sorted(asks)
    ]
    answers = writer.write(chats, config.self_new_tokens, Sampling(temperature=config.distil_temperature))
    found = {}
    for answer in answers:
        if answer.text:
            kept.store(config, "self", int(str(answer.key)), answer)
            found[answer.key] = replace(answer, states=None)
    return [
        {
            "source": SELF,
            "finished": found[place].finished,
            "loops": found[place].loops,
            "messages": [
                {"role": "user", "content": asks[place]},
                {"role": "assistant", "content": found[place].text},
            ],
        }
        for place in sorted(asks)
        if place in found
    ]
