"""What an adapter says of the heads that it makes: the `medusa_config.json` that travels with its weights."""

import hashlib

import torch

from medusa_spec.adapters import active_adapters, active_part, adapted_layers
from medusa_spec.config import MedusaConfig
from medusa_spec.heads import DraftHeads

NOTE = "calibration"
"""Module of the heads of which each adapter brings a copy, so that PEFT's own calls swap what it says, too."""
SMALLEST = 2.0**-14
"""Below it float16 rounds what bfloat16 holds."""


def note_of(heads: DraftHeads) -> MedusaConfig | None:
    """What the active adapter says, or one that was merged into the heads for good; None where none says anything.

    PEFT's `unload` leaves the last active adapter's copy behind, as its `merge_and_unload` does: the weights tell which
    it was.
    """
    said = active_part(getattr(heads, NOTE), heads).read()
    if not said:
        return None
    config = MedusaConfig.from_text(said.decode())
    unloaded = not active_adapters(heads) and config.base_heads_hash in (None, weights_hash(heads))
    return None if unloaded else config


def weights_hash(heads: DraftHeads) -> str:
    """Sixteen hex digits that name the heads' own weights as they are stored, in whatever dtype they were loaded."""
    digest = hashlib.sha256()
    for name, tensor in sorted(_own_state(heads).items()):
        if tensor.is_floating_point():
            rounded = tensor.detach().to("cpu", torch.bfloat16).float()
            tensor = torch.where(rounded.abs() < SMALLEST, 0.0, rounded)
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _own_state(heads: DraftHeads) -> dict[str, torch.Tensor]:
    """The heads' state without what adapters added to it."""
    layers = [name for name, _ in adapted_layers(heads)]
    state = {}
    for key, tensor in heads.state_dict().items():
        inside = next((name for name in layers if key.startswith(name + ".")), None)
        if inside is None:
            state[key] = tensor
        elif key.startswith(inside + ".base_layer."):
            state[inside + key.removeprefix(inside + ".base_layer")] = tensor
    return {key: tensor for key, tensor in state.items() if not key.startswith(NOTE + ".")}
