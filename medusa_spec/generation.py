"""From generate()'s arguments to a request and back. Knows Hugging Face's generate and its traps, not the loop."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.utils import logging

from medusa_spec.acceptance import EXACT_SAMPLING, GREEDY, Rule
from medusa_spec.backbone import Backbone
from medusa_spec.cache import SlabCache
from medusa_spec.decoding import decode
from medusa_spec.drafters import Drafter
from medusa_spec.errors import ConfigError, UnsupportedError
from medusa_spec.noise import SharedNoise
from medusa_spec.request import Request, Row
from medusa_spec.rowwise import criteria_of, processors_of, reason_against_rows
from medusa_spec.speculation import Speculation, checked
from medusa_spec.static_decoding import StaticSteps
from medusa_spec.stats import DecodingStats
from medusa_spec.stopping import Sequence

logger = logging.get_logger(__name__)

INSTEAD = "call model.target.generate(...) for it"

REFUSED_ARGUMENTS = {
    "assistant_model": "this library needs no assistant; leave it out",
    "assistant_tokenizer": "this library needs no assistant; leave it out",
    "custom_generate": f"tree decoding is a custom generate of its own; {INSTEAD}",
    "negative_prompt_ids": f"classifier-free guidance runs a second prompt; {INSTEAD}",
    "position_ids": "positions follow from attention_mask; leave them out",
    "inputs_embeds": f"drafts need token ids; pass input_ids, or {INSTEAD}",
    "token_healing": f"a custom generate is not given the tokenizer that it needs; {INSTEAD}",
}
"""Arguments of generate() that cannot be speculated, and what to do instead."""

OTHER_MODES = {
    "contrastive_search": "penalty_alpha",
    "constrained_beam_search": "force_words_ids",
    "dola_generation": "dola_layers",
    "assisted_generation": "assistant_early_exit or use_mtp",
}
"""Generation modes that a callable would silently stand in for, and the settings that ask for them."""

HANDLED_MODEL_KWARGS = {
    *("attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"),
    *("output_attentions", "output_hidden_states", "return_dict"),
}
"""What generate() hands on for the model's forward and the loop deals with; anything else would be lost."""


@dataclass
class MedusaGenerateOutput(GenerateDecoderOnlyOutput):
    """What `generate(return_dict_in_generate=True)` returns: Hugging Face's output and the counters of the decoding.

    Attributes:
        stats: Counters and times; see `DecodingStats`.
    """

    stats: DecodingStats | None = None


def generate(
    backbone: Backbone,
    drafter: Drafter,
    *args: Any,
    draft_nodes: int | None = None,
    speculation: Speculation,
    mode: str | None = None,
    record: Callable[[DecodingStats], None],
    steps: StaticSteps | None = None,
    **kwargs: Any,
) -> Any:
    """Hugging Face's generate() with the tree loop in place of its own.

    Argument checks, generation config, logits processors and stopping criteria are Hugging Face's; see
    `MedusaModel.generate` for the arguments.

    Args:
        backbone: The target.
        drafter: What proposes trees.
        *args: Positional arguments of generate().
        draft_nodes: Most draft nodes per pass; 0 is plain decoding.
        speculation: What the model has learnt about drafting.
        mode: Of speculation, for this call; None is the model's.
        record: Is given the counters.
        steps: Decodes in steps of fixed shape where that serves.
        **kwargs: Keyword arguments of generate().
    """
    for name, remedy in REFUSED_ARGUMENTS.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise UnsupportedError(f"{name} cannot be speculated: {remedy}")
    if not isinstance(drafter, Drafter):
        raise ConfigError(f"drafter must be a Drafter, such as NgramDrafter(), got {drafter!r}")
    if draft_nodes is not None and (type(draft_nodes) is not int or draft_nodes < 0):
        raise ConfigError(f"draft_nodes must be an integer of 0 or more, or None, got {draft_nodes!r}")
    if mode is not None:
        checked(mode)
    backbone.check_unchanged()
    kwargs = _with_stop_strings(backbone.model, kwargs)
    loop = functools.partial(
        _decode_in_generate,
        backbone=backbone,
        drafter=drafter,
        draft_nodes=draft_nodes,
        speculation=speculation,
        mode=mode,
        record=record,
        steps=steps,
        # A callable is handed neither of these: they are bound here. Hugging Face still puts the prompt.
        bound_streamer=kwargs.get("streamer"),
        bound_synced_gpus=kwargs.pop("synced_gpus", None),
        user_cache=kwargs.get("cache", kwargs.get("past_key_values")),
    )
    target: Any = backbone.model
    return target.generate(*args, custom_generate=loop, **kwargs)


def _with_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Turns stop strings into a stopping criterion: with a callable, generate() drops the tokenizer it needs for it."""
    kwargs = dict(kwargs)
    tokenizer = kwargs.pop("tokenizer", None)
    config: GenerationConfig | None = kwargs.get("generation_config")
    stop_strings = kwargs.pop("stop_strings", None)
    for holder in (config, model.generation_config):
        stop_strings = stop_strings or getattr(holder, "stop_strings", None)
    if not stop_strings:
        return kwargs
    if tokenizer is None:
        raise ConfigError("tokenizer must be passed to generate() together with stop_strings, got none")
    quiet = GenerationConfig.from_dict((config or model.generation_config).to_dict())
    quiet.stop_strings = None
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
    return {**kwargs, "generation_config": quiet, "stopping_criteria": criteria}


def _decode_in_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    backbone: Backbone,
    drafter: Drafter,
    draft_nodes: int | None,
    speculation: Speculation,
    mode: str | None,
    record: Callable[[DecodingStats], None],
    steps: StaticSteps | None,
    bound_streamer: Any,
    bound_synced_gpus: bool | None,
    user_cache: Any,
    **model_kwargs: Any,
) -> Any:
    """The callable that Hugging Face's generate() runs in place of its own loop."""
    _refuse(generation_config, logits_processor, model_kwargs)
    rows = input_ids.shape[0]
    reason = None if rows == 1 else _reason_against_batch(logits_processor, stopping_criteria, user_cache)
    if reason is not None:
        logger.warning_once(f"A batch was decoded by the target's own loop, without drafts: {reason}.")
        record(DecodingStats(requests=rows, rule=f"the target's own loop, since {reason}"))
        target: Any = model
        return target._sample(
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=bool(bound_synced_gpus),
            streamer=bound_streamer,
            **model_kwargs,
        )
    cache = SlabCache(backbone.config)
    if user_cache is not None:
        cache.load(user_cache)
    prompts = [
        _prompt(
            input_ids[row : row + 1],
            _row(model_kwargs.get("attention_mask"), row),
            generation_config,
            cache.get_seq_length(),
        )
        for row in range(rows)
    ]
    loaded = cache
    prompt, unread = prompts[0]
    if unread.shape[1] < prompt.shape[1] and backbone.reads_anew(prompt, cache):
        cache, prompts = SlabCache(backbone.config), [(prompt, prompt)]
    returns_dict = bool(generation_config.return_dict_in_generate)
    noise = SharedNoise(rows) if rows > 1 and generation_config.do_sample else None
    texts = [
        Row(
            sequence=Sequence(
                input_ids[row : row + 1], stopping_criteria if rows == 1 else criteria_of(stopping_criteria)
            ),
            unread=unread.to(backbone.device),
            session=drafter.begin(prompt[0].tolist()),
            rule=_rule(generation_config, noise, row),
            processors=logits_processor if rows == 1 else processors_of(logits_processor, row),
            emit=None
            if bound_streamer is None
            else lambda token: bound_streamer.put(torch.tensor([token], device="cpu")),
            keep_scores=returns_dict and bool(generation_config.output_scores),
            keep_logits=returns_dict and bool(generation_config.output_logits),
            ended=None if noise is None else functools.partial(noise.end, row),
        )
        for row, (prompt, unread) in enumerate(prompts)
    ]
    go_on = _others_are_decoding(model, bound_synced_gpus)
    controllers = None
    if go_on is None:  # ranks that share the target must make their passes together
        temperature = float(generation_config.temperature or 1.0) if generation_config.do_sample else 0.0
        controllers = speculation.controllers(backbone, drafter, limit=draft_nodes, temperature=temperature, mode=mode)
    request = Request(
        rows=texts,
        cache=cache,
        reads=None if draft_nodes == 0 else drafter.reads,
        prefill_chunk=generation_config.prefill_chunk_size,
        draft_nodes=draft_nodes,
        controllers=controllers,
        steps=steps,
        go_on=go_on,
    )
    stats = decode(backbone, request) if rows == 1 or backbone.takes_rows else _one_by_one(backbone, request)
    if bound_streamer is not None:
        bound_streamer.end()
    record(stats)
    if user_cache is not None:
        if request.cache is not loaded:
            user_cache.layers = []  # the text was read anew
        request.cache.export(backbone.config, into=user_cache)
    sequences: Any = _side_by_side(texts, generation_config)
    if not returns_dict:
        return sequences
    kept = user_cache
    if user_cache is None and generation_config.use_cache and rows == 1:
        kept = request.cache.export(backbone.config)
    return MedusaGenerateOutput(
        sequences=sequences,
        scores=_collected([text.scores for text in texts], texts[0].keep_scores),
        logits=_collected([text.logits for text in texts], texts[0].keep_logits),
        cache=kept,
        stats=stats,
    )


def _reason_against_batch(
    processors: LogitsProcessorList, criteria: StoppingCriteriaList, user_cache: Any
) -> str | None:
    """Why a batch cannot be decoded row by row, in words; None if it can."""
    if user_cache is not None and user_cache.get_seq_length():
        return "it goes on behind a cache that was passed"
    return reason_against_rows(processors, criteria)


def _row(mask: torch.Tensor | None, row: int) -> torch.Tensor | None:
    return None if mask is None else mask[row : row + 1]


def _rule(config: GenerationConfig, noise: SharedNoise | None, row: int) -> Rule:
    if not config.do_sample:
        return GREEDY
    return EXACT_SAMPLING if noise is None else noise.rule(row)


def _one_by_one(backbone: Backbone, request: Request) -> DecodingStats:
    """Rows that cannot share a pass, one after the other."""
    alone = [replace(request, rows=[row], cache=SlabCache(backbone.config)) for row in request.rows]
    return functools.reduce(DecodingStats.merge, [decode(backbone, one) for one in alone])


def _side_by_side(rows: list[Row], config: GenerationConfig) -> torch.Tensor:
    """Prompts and answers [B, T]; behind the end of a row stands the padding token."""
    if len(rows) == 1:
        return rows[0].sequence.ids.clone()
    padding: Any = getattr(config, "_pad_token_tensor", None)
    longest = max(row.sequence.length for row in rows)
    ids = rows[0].sequence.ids.new_full((len(rows), longest), 0 if padding is None else int(padding))
    for place, row in zip(ids, rows, strict=True):
        place[: row.sequence.length] = row.sequence.ids[0]
    return ids


def _collected(rows: list[list[torch.Tensor]], asked: bool) -> Any:
    """One tensor [B, V] per new token, zero behind the end of a row; Hugging Face annotates it as a tuple of one."""
    if not asked:
        return None
    nothing = torch.zeros_like(rows[0][0])
    return tuple(torch.cat(of_all) for of_all in zip_longest(*rows, fillvalue=nothing))


def _refuse(
    config: GenerationConfig,
    processors: LogitsProcessorList,
    model_kwargs: dict[str, Any],
) -> None:
    """Refuses by name what would otherwise be ignored: a callable gets these silently."""
    found = None
    if (config.num_beams or 1) > 1:
        found = f"num_beams={config.num_beams}: beams are not a single path; {INSTEAD}"
    elif config.prompt_lookup_num_tokens:
        found = 'prompt_lookup_num_tokens: use MedusaModel(..., drafter="ngram") for prompt lookup'
    elif (mode := config.get_generation_mode().value) in OTHER_MODES:
        found = f"{OTHER_MODES[mode]}: it asks for {mode}, which chooses tokens otherwise; {INSTEAD}"
    elif any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in processors):
        found = f"guidance_scale: classifier-free guidance runs a second prompt beside each token; {INSTEAD}"
    elif config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        found = f"output_attentions and output_hidden_states are not collected from trees yet; {INSTEAD}"
    elif lost := sorted(k for k, value in model_kwargs.items() if value is not None and k not in HANDLED_MODEL_KWARGS):
        found = f"{', '.join(lost)}: the drafted passes would go without; {INSTEAD}"
    if found:
        raise UnsupportedError(f"this cannot be speculated: {found}")


def _prompt(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, config: GenerationConfig, past: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompt without padding, and the part of it that is not in the user's cache, each [1, T].

    Padding is left out rather than masked: it never enters the cache, and positions count from the first real token.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        if past:
            raise UnsupportedError("a cache with a padded prompt cannot be speculated; pass the prompt unpadded")
        input_ids = input_ids[:, attention_mask[0].bool().to(input_ids.device)]
    if input_ids.shape[1] == 0:
        raise ConfigError("input_ids must hold at least one token that attention_mask does not hide, got none")
    # With a cache either the whole text or only its new part is passed; the mask covers the whole either way.
    whole = attention_mask.shape[1] if attention_mask is not None else getattr(config, "_mask_length", -1)
    unread = input_ids[:, past:] if past and whole == input_ids.shape[1] else input_ids
    if unread.shape[1] == 0:
        raise ConfigError(f"input_ids must go on beyond the {past} tokens that are in the cache, got no new token")
    return input_ids, unread


def _others_are_decoding(model: Any, synced_gpus: bool | None) -> Callable[[], bool] | None:
    if not synced_gpus:
        return None
    return lambda: model._has_unfinished_sequences(True, synced_gpus=True, device=model.device)
