"""What is to be said about weights, travelling with them: bytes whose sense their writer knows. Knows no weights."""

from typing import Any

import torch
from torch import nn


class Note(nn.Module):
    """Bytes that belong to heads and are no weight of theirs, so that an adapter can bring its own.

    Empty on heads as they are, and then no part of their state. PEFT's `modules_to_save` gives each adapter a copy,
    which is loaded, saved and unloaded with it.
    """

    text: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        # On the CPU even where heads are made without memory: nobody would fill it in.
        self.register_buffer("text", torch.zeros(0, dtype=torch.uint8, device="cpu"), persistent=False)

    def read(self) -> bytes:
        """The bytes."""
        return self.text.cpu().numpy().tobytes()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not prefix or ".modules_to_save." in prefix:  # PEFT asks the copy itself which tensors it has
            destination[prefix + "text"] = self.text

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        found = state_dict.get(prefix + "text")
        if found is not None:  # of any length
            self.text = found.to(self.text.device, torch.uint8, copy=True)


def note_tensor(text: bytes) -> torch.Tensor:
    """The state of a note that says `text`: uint8 [bytes]."""
    return torch.tensor(list(text), dtype=torch.uint8)
