"""Medusa heads made fast for decoding: all heads in one product. Same guesses as the modules, no gradients."""

from collections.abc import Callable
from typing import Any

import torch

from medusa_spec.heads.medusa import MedusaHeads

Linear = Callable[[torch.Tensor], torch.Tensor]


def dense_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """torch's own linear with these weights."""
    return lambda x: torch.nn.functional.linear(x, weight, bias)


class StackedMedusaHeads:
    """A frozen copy of `MedusaHeads` with the K heads stacked.

    The first block of every head reads the same h, so K products become one of K * H rows; with the shared LM head
    the K features then pass it together.

    Args:
        heads: Trained heads.
        dtype: Compute dtype, the target's.
        device: Where to compute.
        linear: Makes a linear from frozen weights [out, in] and biases; the caller may know a faster one than torch's.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        *,
        dtype: torch.dtype,
        device: torch.device,
        linear: Callable[[torch.Tensor, torch.Tensor | None], Linear] = dense_linear,
    ) -> None:
        config = heads.config
        self.num_heads, self.hidden_size = config.num_heads, config.hidden_size
        self.dtype, self.device = dtype, device
        self.projection = heads.projection.to(dtype, device)

        def stack(tensors: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack([t.detach() for t in tensors]).to(device=device, dtype=dtype).contiguous()

        modules: list[Any] = list(heads.heads)  # type checkers know nothing of a module's attributes
        blocks = [[head.blocks[layer].linear for head in modules] for layer in range(config.num_layers)]
        self.weights = [stack([linear.weight for linear in layer]) for layer in blocks]  # each [K, H, H]
        self.biases = [stack([linear.bias for linear in layer]) for layer in blocks]  # each [K, H]
        self._linear = linear
        self._first: dict[int, Linear] = {}
        self._lm_head = linear(self.projection.weight, self.projection.bias)
        self.own = self.own_bias = self.down = self.up = None
        if config.lm_head == "own":
            self.own = stack([head.lm_head.weight for head in modules])  # [K, Vd, H]
            if modules[0].lm_head.bias is not None:
                self.own_bias = stack([head.lm_head.bias for head in modules])  # [K, Vd]
        elif config.lm_head == "low_rank":
            self.down = stack([head.down.weight for head in modules])  # [K, r, H]
            self.up = stack([head.up.weight for head in modules])  # [K, Vd, r]

    def features(self, h: torch.Tensor, count: int) -> torch.Tensor:
        """h [M, H] to the features of the first `count` heads [count, M, H]."""
        if count not in self._first:
            weight, bias = self.weights[0][:count], self.biases[0][:count]
            self._first[count] = self._linear(weight.reshape(-1, self.hidden_size), bias.reshape(-1))
        first = self._first[count](h).view(len(h), count, -1).transpose(0, 1)
        z = h + torch.nn.functional.silu(first)
        for weight, bias in zip(self.weights[1:], self.biases[1:], strict=True):
            z = z + torch.nn.functional.silu(torch.baddbmm(bias[:count, None], z, weight[:count].mT))
        return z

    @torch.inference_mode()
    def logits(self, count: int, h: torch.Tensor) -> torch.Tensor:
        """h [M, H] to draft logits [M, count, draft vocabulary] in the compute dtype, of the first `count` heads."""
        z = self.features(h, count)
        if self.own is not None:
            raw = torch.bmm(z, self.own[:count].mT)
            raw = raw if self.own_bias is None else raw + self.own_bias[:count, None]
        else:
            raw = self._lm_head(z.flatten(0, 1)).unflatten(0, (count, len(h)))
            if self.up is not None and self.down is not None:
                raw = raw + torch.bmm(torch.bmm(z, self.down[:count].mT), self.up[:count].mT)
        return self.projection.finish(raw).transpose(0, 1)

    def __call__(self, h: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """h [H] to draft logits [count, draft vocabulary]; None asks all K heads."""
        return self.logits(self.num_heads if count is None else count, h[None])[0]
