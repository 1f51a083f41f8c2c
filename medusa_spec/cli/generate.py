"""medusa-spec generate: continues one prompt, text as it comes."""

import sys
from pathlib import Path
from typing import Any

import torch

from medusa_spec.chat_template import check_chat_template
from medusa_spec.cli.loading import Loaded
from medusa_spec.cli.show import MarkedStreamer, WatchedDrafter, accepted_marks
from medusa_spec.errors import ConfigError
from medusa_spec.prompts import as_prompt, encode
from medusa_spec.stats import DecodingStats


def generate(
    loaded: Loaded,
    prompt: str,
    *,
    sampling: dict[str, Any],
    max_new_tokens: int,
    draft_nodes: int | None,
    speculation: str | None,
    seed: int,
    chat_template: bool,
    show_accepted: bool,
) -> None:
    """Write the continuation to standard output, notes and figures to standard error."""
    if loaded.note:
        print(loaded.note, file=sys.stderr)
    if chat_template and loaded.model.drafter.name in ("heads", "hybrid"):
        check_chat_template(loaded.model.medusa_config, loaded.tokenizer)
    encoded = encode(loaded.tokenizer, as_prompt(prompt).messages, chat_template=chat_template)
    arguments: dict[str, Any] = {name: tensor.to(loaded.model.device) for name, tensor in encoded.items()}
    marks = accepted_marks(sys.stdout) if show_accepted else None
    streamer = MarkedStreamer(loaded.tokenizer, marks=marks)
    if show_accepted:
        arguments["drafter"] = WatchedDrafter(loaded.model.drafter, streamer.drafted)
    torch.manual_seed(seed)
    loaded.model.generate(
        **arguments,
        **sampling,
        max_new_tokens=max_new_tokens,
        draft_nodes=draft_nodes,
        speculation=speculation,
        streamer=streamer,
    )
    if show_accepted and loaded.model.last_stats is not None:
        print(figures(loaded.model.last_stats), *loaded.model.last_stats.decisions, sep="\n", file=sys.stderr)


def figures(stats: DecodingStats) -> str:
    """One line on what drafting brought."""
    return (
        f"{stats.rule}: {stats.new_tokens} tokens in {stats.passes} passes: mu {stats.mu:.2f} accepted draft "
        f"tokens per drafted pass, tau {stats.tau:.2f} tokens per pass"
    )


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The text given, or the file's, or standard input's."""
    if prompt is not None and prompt_file is not None:
        raise ConfigError("--prompt and --prompt-file: expected one of them, got both")
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        if not prompt_file.is_file():
            raise ConfigError(f"--prompt-file: expected a text file, found no file {prompt_file}")
        try:
            return prompt_file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"--prompt-file: expected text in UTF-8, {prompt_file} holds none: {error}") from error
    if sys.stdin.isatty():
        print("Prompt (end it with Ctrl-D):", file=sys.stderr)
    return sys.stdin.read()


def sampling_arguments(temperature: float, top_k: int | None, top_p: float | None) -> dict[str, Any]:
    """Arguments of `generate`: greedy at temperature 0."""
    if temperature < 0:
        raise ConfigError(f"--temperature: expected 0 (greedy) or more, got {temperature}")
    if temperature == 0:
        if top_k is not None or top_p is not None:
            raise ConfigError("--top-k and --top-p need sampling: give --temperature above 0, or leave them out")
        return {"do_sample": False}
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature}
    # What is not asked for is switched off, whatever the model's own generation config says.
    return sampling | {"top_k": top_k or 0, "top_p": 1.0 if top_p is None else top_p}
