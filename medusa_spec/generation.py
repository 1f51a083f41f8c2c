"""From generate()'s arguments to a request and back. Knows Hugging Face's generate and its traps, not the loop."""

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from medusa_spec.acceptance import EXACT_SAMPLING, GREEDY
from medusa_spec.backbone import Backbone
from medusa_spec.cache import SlabCache
from medusa_spec.decoding import Request, decode
from medusa_spec.drafters import Drafter
from medusa_spec.errors import ConfigError, UnsupportedError
from medusa_spec.extras import Extras
from medusa_spec.generate_options import INSTEAD, Settings, refuse_options, with_own_cache
from medusa_spec.speculation import Speculation, checked
from medusa_spec.static_decoding import StaticSteps
from medusa_spec.stats import DecodingStats
from medusa_spec.stopping import Sequence
from medusa_spec.streaming import ended

HANDLED_MODEL_KWARGS = {
    *("attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"),
    *("output_attentions", "output_hidden_states", "return_dict"),
}
"""What generate() hands on for the model's forward and the loop deals with; anything else would be lost."""


CACHE_NAMES = ("cache", "past_key_values")
"""Names of generate()'s argument for a user's cache."""


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
    kwargs = _by_name(backbone.model, args, kwargs)
    refuse_options(kwargs, backbone.model)
    kwargs.pop("custom_generate", None)
    if not isinstance(drafter, Drafter):
        raise ConfigError(f"drafter must be a Drafter, such as NgramDrafter(), got {drafter!r}")
    if draft_nodes is not None and (type(draft_nodes) is not int or draft_nodes < 0):
        raise ConfigError(f"draft_nodes must be an integer of 0 or more, or None, got {draft_nodes!r}")
    if mode is not None:
        checked(mode)
    backbone.check_unchanged()
    kwargs = with_own_cache(_with_stop_strings(backbone.model, kwargs), backbone.model)
    with ended(kwargs.pop("streamer", None)) as stream:
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
            bound_streamer=stream,
            bound_synced_gpus=_synced(backbone.model, kwargs.pop("synced_gpus", None)),
            user_cache=next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None),
        )
        target: Any = backbone.model
        return target.generate(**kwargs, streamer=stream, custom_generate=loop)


def _by_name(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of generate() by name, so that none is missed for its place."""
    if not args:
        return dict(kwargs)
    function: Any = model.generate
    given = inspect.signature(function).bind_partial(*args)
    doubled = sorted(set(given.arguments) & set(kwargs))
    if doubled:
        raise TypeError(f"generate() got multiple values for argument {doubled[0]!r}")
    return {**given.arguments, **kwargs}


def _synced(model: PreTrainedModel, synced_gpus: bool | None) -> bool | None:
    """As Hugging Face finds it out: ranks that share the weights of the target must make their passes together."""
    if synced_gpus is not None or not (distributed.is_available() and distributed.is_initialized()):
        return synced_gpus
    return distributed.get_world_size() > 1 and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))


def _with_stop_strings(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Turns stop strings into a stopping criterion: with a callable, generate() drops the tokenizer it needs for it."""
    kwargs = dict(kwargs)
    tokenizer = kwargs.pop("tokenizer", None)
    stop_strings = Settings(kwargs, model).stop_strings
    if not stop_strings:
        return kwargs
    kwargs.pop("stop_strings", None)
    if tokenizer is None:
        raise ConfigError("tokenizer must be passed to generate() together with stop_strings, got none")
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):  # the user's own goes before
        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
    kwargs["stopping_criteria"] = criteria
    if getattr(model.generation_config, "stop_strings", None):
        kwargs["stop_strings"] = None  # or the model's would come back
    if kwargs.get("generation_config") is not None:
        kwargs["generation_config"] = copy.deepcopy(kwargs["generation_config"])
        kwargs["generation_config"].stop_strings = None
    return kwargs


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
    _refuse(input_ids, generation_config, logits_processor, model_kwargs)
    cache = SlabCache(backbone.config)
    if user_cache is not None:
        cache.load(user_cache)
    prompt, unread = _prompt(input_ids, model_kwargs.get("attention_mask"), generation_config, cache.get_seq_length())
    loaded, padding = cache, input_ids.shape[1] - prompt.shape[1]
    if unread.shape[1] < prompt.shape[1] and backbone.reads_anew(prompt, cache):
        cache, unread = SlabCache(backbone.config), prompt
    returns_dict = bool(generation_config.return_dict_in_generate)
    go_on = _others_are_decoding(model, bound_synced_gpus)
    controller = None
    if go_on is None:  # ranks that share the target must make their passes together
        temperature = float(generation_config.temperature or 1.0) if generation_config.do_sample else 0.0
        controller = speculation.controller(backbone, drafter, limit=draft_nodes, temperature=temperature, mode=mode)
    request = Request(
        sequence=Sequence(input_ids, stopping_criteria),
        prefill_ids=unread.to(backbone.device),
        cache=cache,
        session=drafter.begin(prompt[0].tolist()),
        reads=None if draft_nodes == 0 else drafter.reads,
        rule=EXACT_SAMPLING if generation_config.do_sample else GREEDY,
        processors=logits_processor,
        prefill_chunk=generation_config.prefill_chunk_size,
        draft_nodes=draft_nodes,
        controller=controller,
        emit=None if bound_streamer is None else lambda token: bound_streamer.put(torch.tensor([token], device="cpu")),
        keep_scores=returns_dict and bool(generation_config.output_scores),
        keep_logits=returns_dict and bool(generation_config.output_logits),
        extras=_extras(generation_config, padding=padding) if returns_dict else None,
        steps=steps,
        go_on=go_on,
    )
    stats = decode(backbone, request)
    if bound_streamer is not None:
        bound_streamer.end()
    record(stats)
    if user_cache is not None:
        if request.cache is not loaded:
            user_cache.layers = []  # the text was read anew
        request.cache.export(backbone.config, into=user_cache, padding=padding)
    sequences: Any = request.sequence.ids.clone()
    if not returns_dict:
        return sequences
    kept = user_cache
    if kept is None and generation_config.use_cache:
        kept = request.cache.export(backbone.config, padding=padding)
    return MedusaGenerateOutput(
        sequences=sequences,
        scores=_collected(request.scores, request.keep_scores),
        logits=_collected(request.logits, request.keep_logits),
        hidden_states=None if request.extras is None else request.extras.given("hidden_states"),  # type: ignore[arg-type]
        attentions=None if request.extras is None else request.extras.given("attentions"),  # type: ignore[arg-type]
        cache=kept,
        stats=stats,
    )


def _extras(config: GenerationConfig, *, padding: int) -> Extras | None:
    asked = tuple(name for name in ("hidden_states", "attentions") if getattr(config, f"output_{name}"))
    if not asked:
        return None
    wanted: Any = config.output_hidden_states  # a flag, the number of a layer, or several
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        wanted = [wanted]
    selected = list(wanted) if isinstance(wanted, (list, tuple)) else None
    return Extras(asked=asked, padding=padding, selected=selected)


def _collected(tensors: list[torch.Tensor], asked: bool) -> Any:
    """One tensor per new token; Hugging Face annotates the field as a tuple of one."""
    return tuple(tensors) if asked else None


def _refuse(
    input_ids: torch.Tensor,
    config: GenerationConfig,
    processors: LogitsProcessorList,
    model_kwargs: dict[str, Any],
) -> None:
    """Refuses by name what would otherwise be ignored: a callable gets these silently."""
    found = None
    if any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in processors):
        found = f"guidance_scale: classifier-free guidance runs a second prompt beside each token; {INSTEAD}"
    elif lost := sorted(k for k, value in model_kwargs.items() if value is not None and k not in HANDLED_MODEL_KWARGS):
        found = f"{', '.join(lost)}: the drafted passes would go without; {INSTEAD}"
    elif (
        len(input_ids) > 1
        and config.return_dict_in_generate
        and (config.output_attentions or config.output_hidden_states)
    ):
        found = f"output_attentions and output_hidden_states of several rows: decode the rows one by one, or {INSTEAD}"
    elif input_ids.shape[0] != 1:
        found = (
            f"a batch of {input_ids.shape[0]} rows: trees are decoded one row at a time so far. Decode the rows one "
            f"by one, or {INSTEAD}"
        )
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
