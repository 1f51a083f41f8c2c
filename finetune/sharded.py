"""Weights that FSDP has spread over processes, put together. Knows tensors, no trainer."""

import copy

import torch
from torch import nn

from medusa_spec.finetune.trained import TrainedHeads


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict with all shards put together; every process must ask for it at the same time."""
    return {name: _whole(tensor) for name, tensor in model.state_dict().items()}


def put_together(model: nn.Module) -> None:
    """Replaces sharded parameters by whole ones; every process must do so at the same time."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if hasattr(parameter, "full_tensor"):
                whole = nn.Parameter(_whole(parameter), requires_grad=parameter.requires_grad)
                module._parameters[name] = whole  # FSDP's modules have a `__setattr__` of their own


def unsharded_copy(model: TrainedHeads) -> TrainedHeads:
    """A copy to measure with; the target's LM head and embeddings, which are not trained, are shared with it."""
    shared = (model.heads.projection, model.heads.embedding)
    return copy.deepcopy(model, {id(part): part for part in shared})


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if hasattr(tensor, "full_tensor") else tensor
