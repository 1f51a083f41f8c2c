"""Adapters that are in place: what they are taken as, whether they changed, and weights with them merged in.

Reads attributes, calls methods of the adapters' own layers; needs no PEFT.
"""

import copy
from typing import Any, TypeVar

import torch
from torch import nn

from medusa_spec.errors import UnsupportedError

ModuleT = TypeVar("ModuleT", bound=nn.Module)


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
    return tuple(
        (name, tuple(module.active_adapters), bool(module.disable_adapters), bool(module.merged))
        for name, module in adapted_layers(model)
    )


def adapted_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers around which adapters stand, by name."""
    wanted = ("active_adapters", "disable_adapters", "merged")
    return [(name, module) for name, module in model.named_modules() if all(hasattr(module, key) for key in wanted)]


def active_adapters(model: nn.Module) -> list[str]:
    """Names of the adapters that the model computes with, in the order in which layers have them."""
    found = [name for _, layer in adapted_layers(model) if not layer.disable_adapters for name in layer.active_adapters]
    return list(dict.fromkeys(found))


def active_part(module: Any, model: nn.Module) -> Any:
    """The copy of a module that the active adapter brought along (PEFT's `modules_to_save`), else the module itself.

    PEFT's own choice among the copies is not asked: it stays where it was if an adapter is added from outside.
    """
    copies = getattr(module, "modules_to_save", {})
    found = [name for name in active_adapters(model) if name in copies]
    return copies[found[0]] if len(found) == 1 else getattr(module, "original_module", module)


@torch.no_grad()
def merged_copy(model: ModuleT, *held: Any) -> ModuleT:
    """The model with the active adapters merged into its layers, which are plain ones again; itself if it has none.

    What no adapter touches is shared with the model, whose own weights are not altered.

    Args:
        model: Adapters may stand in it, several by layer, active or not.
        *held: Tensors and other things that the model holds beside its modules, shared with it too.
    """
    layers = adapted_layers(model)
    if not layers:
        return model
    memo = {id(part): part for part in (*held, *model.parameters(), *model.buffers())}
    own = {id(tensor) for _, layer in layers for tensor in (*layer.parameters(), *layer.buffers())}
    memo = {key: part for key, part in memo.items() if key not in own}
    for _, layer in layers:
        memo[id(layer)] = _merged(layer)
    return copy.deepcopy(model, memo)


def _merged(layer: Any) -> nn.Module:
    """The plain layer that does what the forward of one with adapters does right now."""
    copied = copy.deepcopy(layer)
    if copied.disable_adapters and copied.merged:
        copied.unmerge()
    elif not copied.disable_adapters and not copied.merged:
        copied.merge()
    return copied.get_base_layer()
