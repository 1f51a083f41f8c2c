"""Attention and masks that stand in for a model's own and hand every call without a tree to them. Knows no heads."""

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from medusa_spec.errors import AttachError

PREFIX = "medusa_spec."
TREE_ARGUMENT = "medusa_tree_pass"


class Pass(Protocol):
    """What a verify pass offers to the delegates and to `Backbone.verify`."""

    cache: Any

    @property
    def positions(self) -> torch.Tensor:
        """Position of every node of all rows, int64 [1, M]."""

    @property
    def no_mask(self) -> torch.Tensor:
        """A mask of four dimensions that says nothing."""

    def attend(
        self, module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of a layer over prefix and tree, with the signature of Hugging Face's attention functions."""


def attach(model: PreTrainedModel) -> list[tuple[Any, str]]:
    """Points every config of the model at delegating functions; returns (config, original name) to undo it."""
    own = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    configs: dict[int, Any] = {id(module.config): module.config for module in own}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            configs.setdefault(id(config), config)
    originals = []
    for config in configs.values():
        # A model built from the config of a wrapped one brings the name along without being wrapped.
        name = (config._attn_implementation or "eager").removeprefix(PREFIX)
        register(name)
        originals.append((config, name))
    for config, name in originals:
        config._attn_implementation_internal = PREFIX + name
    return originals


def register(name: str) -> None:
    """Registers the delegating attention and mask for an original implementation; once per name and process."""
    if PREFIX + name in AttentionInterface._global_mapping:
        return

    def attention(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        tree_pass: Pass | None = kwargs.pop(TREE_ARGUMENT, None)
        if tree_pass is not None:
            return tree_pass.attend(module, query, *args, **kwargs)
        return _original_attention(module, name)(module, query, *args, **kwargs)

    AttentionInterface.register(PREFIX + name, attention)
    masks = AttentionMaskInterface()
    if name in masks:
        # Without this the mask would be skipped for an unknown name, and plain left-padded calls would be wrong.
        AttentionMaskInterface.register(PREFIX + name, lambda *args, **kwargs: masks[name](*args, **kwargs))


def _original_attention(module: nn.Module, name: str) -> Callable[..., tuple[torch.Tensor, Any]]:
    """The function that the module's own modelling file would have called under its original name."""
    for owner in type(module).__mro__:
        namespace = vars(sys.modules.get(owner.__module__, sys))
        interface = namespace.get("ALL_ATTENTION_FUNCTIONS")
        if interface is not None:
            return interface.get_interface(name, namespace.get("eager_attention_forward"))
    raise AttachError(
        f"{type(module).__name__} asks for attention outside transformers' attention interface; "
        "tree attention cannot be attached to it"
    )
