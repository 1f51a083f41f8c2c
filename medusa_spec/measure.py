"""Measures tree decoding against Hugging Face's generate and against this project's plain decoding.

All arms run in one process, prompt by prompt, in an order that rotates, so that a machine that
slows down slows them all. Tokens are counted up to and including EOS, for all arms alike.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from medusa_spec.chat_template import check_chat_template
from medusa_spec.comparison import Comparison, PromptRecord
from medusa_spec.errors import ConfigError
from medusa_spec.figures import Run
from medusa_spec.machine import LoadWatch, machine_facts, peak_memory_mib
from medusa_spec.prompts import Message, Prompt, as_prompt, encode
from medusa_spec.stats import DecodingStats

if TYPE_CHECKING:
    from medusa_spec.model import MedusaModel

WARM_UP_TOKENS = 32
# What one run per prompt and the count of new tokens rest on.
OURS = ("streamer", "return_dict_in_generate", "num_return_sequences", "input_ids")

Watch = Callable[[str, int, Prompt], dict[str, Any]]


class Arm(NamedTuple):
    """A way to decode: its `generate`, and the device of its inputs."""

    generate: Callable[..., torch.Tensor]
    device: torch.device


def compare(
    model: "MedusaModel",
    baseline: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Sequence[Message] | Prompt],
    *,
    max_new_tokens: int = 128,
    categories: Sequence[str] | None = None,
    draft_nodes: int | None = None,
    speculation: str | None = None,
    chat_template: bool = True,
    warm_up: bool = True,
    seed: int = 0,
    labels: dict[str, Any] | None = None,
    watch: Watch | None = None,
    on_prompt: Callable[[int, int], None] | None = None,
    **generation: Any,
) -> Comparison:
    """Decode every prompt with every arm and compare speed and output.

    Args:
        model: The wrapped model: the arms "plain" (`draft_nodes=0`) and "tree".
        baseline: A second, untouched load of the target: the arm "hf". None leaves that arm out.
        tokenizer: Of the target.
        prompts: Texts, lists of messages, or `Prompt`s. In later turns of a conversation all arms
            are given the same first arm's answer.
        max_new_tokens: Per turn.
        categories: One per prompt, for figures by category; else the `Prompt`s' own.
        draft_nodes: Most draft nodes per pass of the arm "tree"; None is the model's own choice.
        speculation: Its mode; None is the model's.
        chat_template: Whether to put prompts into the chat template.
        warm_up: Decode a little first, uncounted.
        seed: Of sampling (set anew before every run, equal for all arms) and of the bootstrap.
        labels: Recorded with the settings: names of model, heads, data.
        watch: Called before each run with arm, index and prompt; gives what is added to that run's
            arguments of `generate`, such as a streamer.
        on_prompt: Called after each prompt with the number done and the number in all.
        generation: For `generate` of all arms alike; sampling is off unless `do_sample` is given.

    Returns:
        The comparison; `.table()` for people, `.to_json()` for machines.

    Raises:
        ConfigError: If there is nothing to compare, or `generation` holds what is set here.
    """
    asked = _asked_prompts(prompts, categories)
    _check(max_new_tokens, draft_nodes, generation)
    generation = {"do_sample": False, "max_new_tokens": max_new_tokens, **generation}
    arms = _arms(model, baseline, draft_nodes, speculation)
    if chat_template and model.drafter.name in ("heads", "hybrid"):
        check_chat_template(model.medusa_config, tokenizer)
    session = _Session(model, tokenizer, arms, generation, chat_template, seed, watch)
    if warm_up:
        session.warm_up(asked[0])
    load = LoadWatch()
    records = []
    for index, prompt in enumerate(asked):
        records.append(session.measure(index, prompt))
        if on_prompt is not None:
            on_prompt(index + 1, len(asked))
    mode = speculation or model.speculation.mode
    settings = dict(labels or {}) | {"draft_nodes": draft_nodes, "speculation": mode, "seed": seed} | generation
    machine = machine_facts(model.device, model.target.dtype)
    machine["peak_memory_mib"] = peak_memory_mib(model.device)
    return Comparison(
        records=tuple(records),
        settings={name: _plain(value) for name, value in settings.items()},
        machine=machine,
        others=load.others(),
        seed=seed,
    )


class _Session:
    """The arms and what all of them are given."""

    def __init__(
        self,
        model: "MedusaModel",
        tokenizer: PreTrainedTokenizerBase,
        arms: dict[str, Arm],
        generation: dict[str, Any],
        chat_template: bool,
        seed: int,
        watch: Watch | None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.arms = arms
        self.generation = generation
        self.chat_template = chat_template
        self.seed = seed
        self.watch = watch
        self.eos_ids = _eos_ids(model, generation)

    def warm_up(self, prompt: Prompt) -> None:
        """Decode the first turn a little with every arm."""
        inputs = self._encode(list(prompt.messages), prompt)
        fewer = min(WARM_UP_TOKENS, self.generation["max_new_tokens"])
        for arm in self.arms:
            self._run(arm, inputs, max_new_tokens=fewer)

    def measure(self, index: int, prompt: Prompt) -> PromptRecord:
        """All turns of one prompt with every arm, the arms' order rotated by the index."""
        names = list(self.arms)
        order = names[index % len(names) :] + names[: index % len(names)]
        runs = {arm: Run((), 0.0) for arm in names}
        stats: dict[str, DecodingStats] = {}
        messages = list(prompt.messages)
        for turn in (None, *prompt.later_turns):
            if turn is not None:
                messages.append({"role": "user", "content": turn})
            answers = {}
            for arm in order:
                extra = self.watch(arm, index, prompt) if self.watch else {}
                answers[arm] = self._run(arm, self._encode(messages, prompt), index=index, **extra)
                runs[arm] = _sum(runs[arm], answers[arm])
                if arm != "hf":
                    counted = self.model.last_stats
                    assert counted is not None  # generate has just set it
                    stats[arm] = stats[arm].merge(counted) if arm in stats else counted
            answer = str(self.tokenizer.decode(list(answers[names[0]].tokens), skip_special_tokens=True))
            messages.append({"role": "assistant", "content": answer})
        return PromptRecord(
            category=prompt.category,
            name=prompt.name or str(index),
            runs=runs,
            tree_stats=stats["tree"],
            plain_stats=stats["plain"],
        )

    def _encode(self, messages: list[Message], prompt: Prompt) -> dict[str, torch.Tensor]:
        shown = self.chat_template and not prompt.raw
        return encode(self.tokenizer, messages, chat_template=shown, tools=prompt.tools)

    def _run(self, arm: str, inputs: dict[str, torch.Tensor], *, index: int = 0, **extra: Any) -> Run:
        """One timed call; the clock starts when the inputs are in place."""
        generate, device = self.arms[arm]
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        torch.manual_seed(self.seed + index)
        _wait(device)
        start = time.perf_counter()
        output = generate(**inputs, **(self.generation | extra))
        _wait(device)
        seconds = time.perf_counter() - start
        new = output[0, inputs["input_ids"].shape[1] :].tolist()
        return Run(cut_after_eos(new, self.eos_ids), seconds)


def cut_after_eos(tokens: Sequence[int], eos_ids: frozenset[int]) -> tuple[int, ...]:
    """Up to and including the first EOS."""
    for place, token in enumerate(tokens):
        if token in eos_ids:
            return tuple(tokens[: place + 1])
    return tuple(tokens)


def _arms(
    model: "MedusaModel", baseline: PreTrainedModel | None, draft_nodes: int | None, speculation: str | None
) -> dict[str, Arm]:
    def plain(**arguments: Any) -> torch.Tensor:
        return model.generate(**arguments, draft_nodes=0)

    def tree(**arguments: Any) -> torch.Tensor:
        return model.generate(**arguments, draft_nodes=draft_nodes, speculation=speculation)

    arms = {} if baseline is None else {"hf": Arm(_generate_of(baseline), baseline.device)}
    return arms | {"plain": Arm(plain, model.device), "tree": Arm(tree, model.device)}


def _generate_of(model: Any) -> Callable[..., torch.Tensor]:
    return model.generate  # through Any: Hugging Face's mixin is opaque to type checkers


def _asked_prompts(
    prompts: Sequence[str | Sequence[Message] | Prompt], categories: Sequence[str] | None
) -> list[Prompt]:
    if not prompts:
        raise ConfigError("prompts: expected at least one, got none; pass texts or messages")
    if categories is not None and len(categories) != len(prompts):
        raise ConfigError(f"categories: expected one per prompt ({len(prompts)}), got {len(categories)}")
    names: Sequence[str | None] = categories or [None] * len(prompts)
    return [as_prompt(item, name) for item, name in zip(prompts, names, strict=True)]


def _check(max_new_tokens: int, draft_nodes: int | None, generation: dict[str, Any]) -> None:
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
    if draft_nodes is not None and draft_nodes < 1:
        raise ConfigError(
            f"draft_nodes: expected at least 1 for the tree arm, got {draft_nodes}; plain decoding is measured anyway"
        )
    taken = sorted(set(OURS) & set(generation))
    if taken:
        raise ConfigError(f"generation arguments: {taken} are set by compare; leave them out")


def _eos_ids(model: "MedusaModel", generation: dict[str, Any]) -> frozenset[int]:
    found = generation.get("eos_token_id", model.target.generation_config.eos_token_id)
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)


def _sum(one: Run, other: Run) -> Run:
    return Run(one.tokens + other.tokens, one.seconds + other.seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _plain(value: Any) -> Any:
    """What JSON can hold: the value, or its text."""
    return value if isinstance(value, str | int | float | bool | None) else str(value)
