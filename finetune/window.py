"""What training logs: means over the steps since the last line. Knows numbers, no trainer."""

from collections.abc import Callable

import torch


class Window:
    """Collects losses and gradient norms, step by step."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._norms: list[dict[int, float]] = []
        self._masked = 0

    def add_losses(self, losses: torch.Tensor, *, piece: int, masked: bool) -> None:
        """Notes each head's loss of a batch, or of the pieces of one.

        Args:
            losses: [K], or of the heads that are trained so far.
            piece: Number of the piece; 0 begins a step.
            masked: Whether the step's batch has no position to learn from.
        """
        if piece:
            self._losses[-1] = self._losses[-1] + losses
            return
        self._losses.append(losses)
        self._masked += masked

    def add_norms(self, norms: dict[int, float]) -> None:
        """Notes the gradient norms of a step, before clipping."""
        self._norms.append(norms)

    def drain(self, total: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Means since the last call, by name, and forgets them.

        Args:
            total: Sums a tensor over all processes, each of which has seen a part of every batch.
        """
        found: dict[str, float] = {}
        if self._losses:
            trained = min(len(losses) for losses in self._losses)  # the number of steps may have grown
            means = total(torch.stack([losses[:trained] for losses in self._losses]).mean(0)).tolist()
            found = {f"loss_head_{k}": round(value, 4) for k, value in enumerate(means)}
        if self._norms:
            for number in self._norms[-1]:
                mean = sum(norms[number] for norms in self._norms) / len(self._norms)
                found[f"grad_norm_head_{number}"] = float(f"{mean:.4g}")
        if self._masked:
            found["masked_batches"] = self._masked
        self._losses, self._norms, self._masked = [], [], 0
        return found
