"""Low-rank adapters put in place for training, on heads or on the target. The only file of finetune that knows PEFT."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from peft.functional import inject_adapter_in_model
from safetensors.torch import load_file
from torch import nn

from medusa_spec.adapters import adapted_layers
from medusa_spec.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from medusa_spec.errors import CheckpointError, ConfigError
from medusa_spec.files import read_json, write_json, write_tensors
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


def adapt_target(model: Any, *, rank: int, alpha: float, seed: int) -> Any:
    """Puts a fresh adapter around every linear layer of a target but its LM head; it changes nothing yet.

    A quantised target stays quantised below it (QLoRA), what else it has of low precision becomes float32.

    Args:
        model: A causal LM, changed in place; `unload()` of what is returned gives it back.
        rank: Of the adapter.
        alpha: What the adapter adds is multiplied by `alpha / rank`.
        seed: Of its first factor; the second is zero.

    Raises:
        ConfigError: If the target is quantised in a way through which nothing can be trained.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        if not quantizer.is_trainable:
            method = getattr(model, "quantization_method", quantizer.quantization_config.quant_method)
            raise ConfigError(
                f"target_rank must be None for this target, got {rank}: it is quantised by {method}, through which "
                "nothing can be trained; give the model as it was before, or quantised by bitsandbytes or torchao"
            )
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # of GPT-2's layers; PEFT sets it right
        made = LoraConfig(r=rank, lora_alpha=alpha, target_modules=_text_layers(model), task_type="CAUSAL_LM")  # type: ignore[arg-type]
        return get_peft_model(model, made)


def _text_layers(model: Any) -> str | list[str]:
    """What PEFT is to put an adapter around: every linear layer, but no tower for pictures or sounds, which a text does
    not pass through: their adapters could not learn, and two processes would wait for their gradients."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    inside = {id(part) for part in decoder.modules()} | {id(head)}
    linear = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    if all(id(part) in inside for _, part in linear):
        return "all-linear"
    return [name for name, part in linear if id(part) in inside and part is not head]


def save_target_adapter(folder: Path, adapted: Any, base: str) -> None:
    """Writes the adapter of a target as PEFT does; each file is complete before it takes its name.

    Args:
        folder: Made if missing.
        adapted: Of `adapt_target`.
        base: Name of the target.
    """
    with tempfile.TemporaryDirectory() as scratch:
        adapted.save_pretrained(scratch, save_embedding_layers=False)
        state, described = load_file(Path(scratch) / ADAPTER_WEIGHTS), read_json(Path(scratch) / ADAPTER_CONFIG)
    write_tensors(folder / ADAPTER_WEIGHTS, state, metadata={"format": "pt"})
    write_json(folder / ADAPTER_CONFIG, described | {"base_model_name_or_path": base})


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
