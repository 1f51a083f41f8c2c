"""The self stage, for `data=("self",)`: the model writes prompts from its template's user turn, and answers them.

Source: Xu et al. 2024, "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing".
"""

import json
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from medusa_spec.errors import DataError
from medusa_spec.files import write_text
from medusa_spec.finetune import stages
from medusa_spec.finetune.config import SELF, FinetuneConfig
from medusa_spec.finetune.target import Target

BATCH = 16
PROMPT_TOKENS = 96
MARK = "MEDUSA-SPEC-PROMPT"


def settings(config: FinetuneConfig, target: Target) -> dict[str, Any]:
    """What the stage's result depends on."""
    return {
        "model": config.model,
        "revision": config.revision,
        "conversations": config.self_conversations,
        "new_tokens": config.self_new_tokens,
        "seed": config.seed,
        "dtype": str(target.dtype),
    }


def run_self(config: FinetuneConfig, target: Target) -> dict[str, Any]:
    """Writes `self.jsonl`, in shards of a batch each, so that a run that was stopped goes on; does nothing if other
    data are given.

    Raises:
        DataError: If the model has no chat template, or wrote nothing that can be used.
    """
    if config.data != (SELF,):
        return {}
    output, wanted = Path(config.output), settings(config, target)
    if stages.begin(output, "self", wanted):
        return dict(stages.read_done(output, "self")["result"])
    folder = output / "self"
    folder.mkdir(exist_ok=True)
    opening = user_opening(target)
    shards = -(-config.self_conversations // BATCH)
    for number in tqdm(range(shards), desc="self", unit="batch"):
        path = folder / f"{number:05d}.jsonl"
        if not path.exists():
            torch.manual_seed(config.seed * 1_000_003 + number)
            write_text(path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in _batch(config, target, opening)))
    # Split at line feeds alone: JSON leaves other separators of lines, U+2028 for one, as they are.
    shard_texts = [(folder / f"{number:05d}.jsonl").read_text(encoding="utf-8") for number in range(shards)]
    lines = [line for text in shard_texts for line in text.split("\n") if line]
    unique = list({json.loads(line)["messages"][0]["content"]: line for line in reversed(lines)}.values())[::-1]
    if not unique:
        raise DataError(f"the model {config.model!r} wrote no prompt that ends by itself; give data instead")
    write_text(output / "self.jsonl", "".join(f"{line}\n" for line in unique))
    result = {"conversations": len(unique), "asked": config.self_conversations}
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


def _batch(config: FinetuneConfig, target: Target, opening: str) -> list[dict[str, Any]]:
    """One batch of conversations: prompts sampled, answers greedy."""
    wanted = _generate(target, [opening] * BATCH, PROMPT_TOKENS, do_sample=True, temperature=1.0, top_p=0.95, top_k=0)
    prompts = [text.strip() for text, finished in wanted if finished]
    prompts = [text for text in dict.fromkeys(prompts) if text]
    if not prompts:
        return []
    rendered = [
        str(
            target.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        )
        for text in prompts
    ]
    answers = _generate(target, rendered, config.self_new_tokens, do_sample=False)
    return [
        {
            "source": SELF,
            "finished": finished,
            "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}],
        }
        for prompt, (answer, finished) in zip(prompts, answers, strict=True)
        if answer
    ]


def _generate(target: Target, texts: list[str], new_tokens: int, **sampling: Any) -> list[tuple[str, bool]]:
    """(text, ended by itself) for each prompt text; the batch is padded on the left."""
    encoded = [target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    width = max(map(len, encoded))
    eos = sorted(target.eos_ids)
    pad = target.tokenizer.pad_token_id if target.tokenizer.pad_token_id is not None else eos[0]
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in encoded])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in encoded])
    out = target.model.generate(
        input_ids=ids.to(target.model.device),
        attention_mask=mask.to(target.model.device),
        max_new_tokens=new_tokens,
        eos_token_id=eos,
        pad_token_id=pad,
        **sampling,
    )
    results = []
    for row in out[:, width:].tolist():
        end = next((i for i, token in enumerate(row) if token in target.eos_ids), None)
        results.append((str(target.tokenizer.decode(row[:end])), end is not None))
    return results
