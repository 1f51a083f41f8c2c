"""Low-rank adapters put in place for training, around layers of heads. The only file of finetune that knows PEFT."""

import warnings
from typing import Any

import torch
from peft import LoraConfig
from peft.functional import inject_adapter_in_model
from torch import nn

from medusa_spec.adapters import adapted_layers
from medusa_spec.errors import CheckpointError, ConfigError
from medusa_spec.heads import DraftHeads

NAME = "default"
"""Of the adapter in training; whoever loads it names it anew."""


def adapt_heads(heads: DraftHeads, *, rank: int, alpha: float, seed: int) -> DraftHeads:
    """Puts a fresh adapter around every linear layer of heads, whose own weights are frozen; it changes nothing yet.

    Args:
        heads: Changed in place.
        rank: Of the adapter.
        alpha: What the adapter adds is multiplied by `alpha / rank`.
        seed: Of its first factor; the second is zero.

    Returns:
        The same heads.
    """
    names = sorted({name.rpartition(".")[2] for name, part in heads.heads.named_modules() if type(part) is nn.Linear})
    if not names:
        raise ConfigError(f"adapter_rank must be None for {heads.config.kind} heads: they have no linear layer")
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        made = LoraConfig(r=rank, lora_alpha=alpha, target_modules=names)  # type: ignore[arg-type]
        inject_adapter_in_model(made, heads, adapter_name=NAME)
    for name, parameter in heads.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return heads


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The adapter's own tensors, by their names in the model."""
    layers = tuple(name + "." for name, _ in adapted_layers(model))
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name.startswith(layers) and ".base_layer." not in name
    }


def load_adapter_tensors(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """The inverse of `adapter_tensors`, strictly.

    Raises:
        CheckpointError: If tensors are missing or surplus.
    """
    own: dict[str, Any] = adapter_tensors(model)
    if set(own) != set(state):
        raise CheckpointError(
            f"an adapter of these layers must hold {len(own)} tensors, got {len(state)}: missing "
            f"{sorted(set(own) - set(state))[:3]}, surplus {sorted(set(state) - set(own))[:3]}; train it again"
        )
    model.load_state_dict(state, strict=False)
