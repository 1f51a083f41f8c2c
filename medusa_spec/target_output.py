"""What passes of the target give. Knows tensors, no models."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetOutput:
    """What one pass of the target gives.

    Attributes:
        logits: [B, T, V], after the model's own post-processing, in the model's dtype.
        h: [B, T, H], the tensor that entered the LM head.
        layers: [B, T, L, H], what entered the L decoder layers asked for (`taps`); None where none was.
        hidden_states: Hugging Face's own tuple of [B, T, H], if it was asked for (`collect`).
        attentions: Likewise, of [B, Hq, T, keys].
    """

    logits: torch.Tensor
    h: torch.Tensor
    layers: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None

    def last(self) -> "TargetOutput":
        """The same, of the last position alone."""
        return self.part(slice(-1, None))

    def part(self, positions: slice) -> "TargetOutput":
        """The same, of some positions."""
        layers = None if self.layers is None else self.layers[:, positions]
        return TargetOutput(logits=self.logits[:, positions], h=self.h[:, positions], layers=layers)

    def at(self, rows: Sequence[int], places: Sequence[int]) -> "TargetOutput":
        """Position `places[i]` of row `rows[i]`, for each i, side by side in one row."""
        index = (list(rows), list(places))
        layers = None if self.layers is None else self.layers[index].unsqueeze(0)
        return TargetOutput(logits=self.logits[index].unsqueeze(0), h=self.h[index].unsqueeze(0), layers=layers)


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetStates:
    """What one pass without the LM head gives: h and layers of a `TargetOutput`."""

    h: torch.Tensor
    layers: torch.Tensor | None = None


def joined(parts: Sequence[TargetOutput], dim: int = 1) -> TargetOutput:
    """Several passes as one: side by side along the positions (dim 1) or the rows (dim 0); attentions do not add up."""
    if len(parts) == 1:
        return parts[0]
    layers = [part.layers for part in parts if part.layers is not None]
    states = zip(*(part.hidden_states or () for part in parts), strict=True)
    return TargetOutput(
        logits=torch.cat([part.logits for part in parts], dim=dim),
        h=torch.cat([part.h for part in parts], dim=dim),
        layers=torch.cat(layers, dim=dim) if layers else None,
        hidden_states=tuple(torch.cat(layer, dim=dim - 3) for layer in states) or None,
    )
