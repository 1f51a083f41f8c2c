"""Adapters of a target: what they are taken as, and whether they changed. Reads attributes; needs no PEFT."""

from typing import Any

from torch import nn

from medusa_spec.errors import UnsupportedError


def without_wrapper(model: Any) -> Any:
    """The model inside a PEFT model, its adapters in place; any other model itself.

    Raises:
        UnsupportedError: For adapters that learn prompts.
    """
    configs = getattr(model, "peft_config", None)
    if not configs or not hasattr(model, "get_base_model"):
        return model
    learned = [name for name, config in configs.items() if getattr(config, "is_prompt_learning", False)]
    if learned:
        raise UnsupportedError(
            f"adapters {learned} learn prompts: their virtual tokens would vanish from the drafted passes; use "
            "adapters that change weights (LoRA and the like), or the base model"
        )
    return model.get_base_model()


def adapter_state(model: nn.Module) -> tuple[Any, ...]:
    """What adapters do to the weights right now: names, active ones, merged, disabled. Equal states, equal outputs."""
    state = []
    for name, module in model.named_modules():
        if hasattr(module, "active_adapters") and hasattr(module, "disable_adapters") and hasattr(module, "merged"):
            state.append((name, tuple(module.active_adapters), bool(module.disable_adapters), bool(module.merged)))
    return tuple(state)
