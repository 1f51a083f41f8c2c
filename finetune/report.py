"""The report stage: the real decoder on held-out prompts, and all figures of the run in one place."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from medusa_spec.checkpoint import CARD_NAME, TARGET_ADAPTER, read_config
from medusa_spec.comparison import Comparison
from medusa_spec.errors import DataError
from medusa_spec.files import read_json, write_json, write_text
from medusa_spec.finetune import stages
from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.data import held_out_records
from medusa_spec.finetune.loops import loops
from medusa_spec.finetune.model_card import model_card
from medusa_spec.finetune.plots import draw_plots
from medusa_spec.finetune.records import Record
from medusa_spec.finetune.report_text import report_text
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.train import load_trained, save_trained
from medusa_spec.measure import compare
from medusa_spec.model import MedusaModel
from medusa_spec.prompts import Prompt, encode
from medusa_spec.tree import PathValues


def settings(config: FinetuneConfig) -> dict[str, Any]:
    """What the stage's result depends on."""
    return {
        "calibrate": stages.read_done(Path(config.output), "calibrate")["hash"],
        "report_prompts": config.report_prompts,
        "report_new_tokens": config.report_new_tokens,
    }


def run_report(config: FinetuneConfig, target: Target) -> dict[str, Any]:
    """Runs the stage: `report/report.md`, `report.json`, plots where matplotlib is there, and the heads' model card.

    Returns:
        The contents of `report.json`.
    """
    output, wanted = Path(config.output), settings(config)
    if stages.begin(output, "report", wanted):
        return dict(read_json(output / "report" / "report.json"))
    folder = output / "report"
    folder.mkdir(exist_ok=True)
    if config.joint:
        target.adapt(output / "joint" / TARGET_ADAPTER)
    comparison = decode(config, target)
    figures = {
        "data": stages.read_done(output, "data")["result"],
        "training": read_config(output / "heads").training,
        "calibration": stages.read_done(output, "calibrate")["result"],
        "ranks": rank_shares(read_config(output / "heads").values),
        "history": read_json(output / config.last_training / "history.json"),
        "measured": comparison.to_dict(),
        "loops": without_loops(comparison),
    }
    plots = draw_plots(figures, folder)
    write_json(folder / "report.json", figures)
    write_text(folder / "report.md", report_text(figures, comparison.table(), plots))
    write_card(config, target, figures)
    stages.finish(output, "report", wanted, {"mu": figures["measured"]["mu"], "plots": plots})
    return figures


def decode(config: FinetuneConfig, target: Target) -> Comparison:
    """Decodes held-out prompts with Hugging Face's generate on an untouched load, plainly, and with the tree."""
    records = held_out_records(config, config.report_prompts, target.tokenizer)
    prompts = [_prompt(record, str(number)) for number, record in enumerate(records)]
    model = target.for_decoding()
    wrapped = MedusaModel(model, Path(config.output) / "heads", speculation="fixed")  # what the heads bring
    room = wrapped.backbone.max_length
    if room is not None:  # learnt positions end: what does not fit cannot be decoded
        room -= config.report_new_tokens
        prompts = [prompt for prompt in prompts if _length(prompt, target.tokenizer) <= room]
    try:
        if not prompts:
            raise DataError(
                f"data must hold out a prompt that leaves room for report_new_tokens = {config.report_new_tokens} "
                f"within the {wrapped.backbone.max_length} positions of the target; lower report_new_tokens"
            )
        return compare(
            wrapped,
            target.untouched(model.dtype),
            target.tokenizer,
            prompts,
            max_new_tokens=config.report_new_tokens,
        )
    finally:
        wrapped.detach()


def _prompt(record: Record, name: str) -> Prompt:
    raw = record.text is not None
    messages = ({"role": "user", "content": record.text},) if raw else record.messages
    return Prompt(messages=messages, tools=record.tools, category=record.source or "", name=name, raw=raw)


def _length(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> int:
    encoded = encode(tokenizer, prompt.messages, chat_template=not prompt.raw, tools=prompt.tools)
    return int(encoded["input_ids"].shape[1])


def rank_shares(values: PathValues | None) -> list[list[float]]:
    """By head, the share of held-out positions at which the truth is its guess number 0, 1, …"""
    return [] if values is None else [[count / values.total for count in ranks] for ranks in values.singles]


def without_loops(comparison: Comparison) -> dict[str, Any]:
    """μ and τ of the answers that do not loop, beside those of all."""
    straight = tuple(record for record in comparison.records if not loops(record.runs["plain"].tokens))
    found: dict[str, Any] = {"looping": len(comparison.records) - len(straight), "of": len(comparison.records)}
    if straight:
        kept = replace(comparison, records=straight)
        speed = {"/".join(pair): kept.speedup(*pair)._asdict() for pair in kept.pairs}
        found |= {"mu": kept.stats().mu, "tau": kept.stats().tau, "speedup": speed}
    return found


def write_card(config: FinetuneConfig, target: Target, figures: dict[str, Any]) -> None:
    """Adds the measured figures to the heads' config and writes their model card."""
    folder = Path(config.output) / "heads"
    saved = read_config(folder)
    measured = figures["measured"]
    keys = (
        "prompts mu tau accepted_marginal accepted_conditional nodes_per_pass tokens_per_second speedup equal machine"
    ).split()
    record = saved.training | {"measured": {key: measured[key] for key in keys if key in measured}}
    record["measured"]["without_loops"] = figures["loops"]
    updated = replace(saved, training=record)
    save_trained(folder, load_trained(config, target.backbone), updated, config, model_card(updated))
    assert (folder / CARD_NAME).exists()
