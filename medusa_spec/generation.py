"""generate() as its users call it: arguments, and Hugging Face's traps with them. Knows no rows and no loop."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import distributed
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from medusa_spec.backbone import Backbone
from medusa_spec.drafters import Drafter
from medusa_spec.errors import ConfigError
from medusa_spec.generate_call import Call
from medusa_spec.generate_options import Settings, refuse_options, with_own_cache
from medusa_spec.speculation import Speculation, checked
from medusa_spec.static_decoding import StaticSteps
from medusa_spec.stats import DecodingStats
from medusa_spec.streaming import ended

CACHE_NAMES = ("cache", "past_key_values")
"""Names of generate()'s argument for a user's cache."""


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
        call = Call(
            backbone=backbone,
            drafter=drafter,
            draft_nodes=draft_nodes,
            speculation=speculation,
            mode=mode,
            record=record,
            steps=steps,
            # A callable is handed neither of these: they are bound here. Hugging Face still puts the prompt.
            streamer=stream,
            synced_gpus=bool(_synced(backbone.model, kwargs.pop("synced_gpus", None))),
            user_cache=next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None),
        )
        target: Any = backbone.model
        return target.generate(**kwargs, streamer=stream, custom_generate=call)


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
