"""The module that joint training trains: heads, and an adapter on the target that they read. Knows no schedule."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from medusa_spec.adapters import adapted_layers
from medusa_spec.backbone import Backbone, TargetStates
from medusa_spec.finetune.divergence import linear_divergence
from medusa_spec.finetune.losses import linear_cross_entropy
from medusa_spec.finetune.ranks import accuracy, measure_ranks
from medusa_spec.finetune.store import UNTRAINED
from medusa_spec.finetune.trained import TrainedHeads
from medusa_spec.heads import DraftHeads

CHOICES = 256
"""Positions whose logits are alive at a time where choices are compared."""
ADAPTER = ".lora_"
"""In the names of the adapter's parameters."""


class JointModel(nn.Module):
    """Heads over the hidden states of a target that has an adapter, which learns with them.

    ```
    loss = what keeps the target as it is + heads_weight * the heads' loss at the adapted h
    ```

    The first is the divergence of the adapted target's choices from those without the adapter, which is switched off
    to teach, or the cross-entropy of the data. Heads' gradients run through h into the adapter. The LM head is frozen:
    the heads share it.

    Source: Cai et al. 2024, "Medusa", sections 2.2.2 (joint loss) and 2.3.2 (the adapter switched off as teacher).

    Args:
        backbone: The target, an adapter around its layers.
        trained: The heads.
        heads_weight: λ0 of the paper.
        target_loss: `kl` or `cross_entropy`.
    """

    def __init__(self, backbone: Backbone, trained: TrainedHeads, *, heads_weight: float, target_loss: str) -> None:
        super().__init__()
        self.target, self.trained = backbone.model, trained
        self.heads_weight, self.target_loss = heads_weight, target_loss
        self._backbone = (backbone,)
        self.projection = backbone.projection().to(trained.heads.projection.weight.dtype)

    @property
    def heads(self) -> DraftHeads:
        """Those that are trained."""
        return self.trained.heads

    @property
    def loss(self) -> str:
        """What the heads are trained by."""
        return self.trained.loss

    @property
    def unroll(self) -> int | None:
        """Of the heads; see `TrainedHeads`."""
        return self.trained.unroll

    @unroll.setter
    def unroll(self, steps: int | None) -> None:
        self.trained.unroll = steps

    def train(self, mode: bool = True) -> "JointModel":
        """Puts the heads into training mode; the target stays in evaluation, as it will decode."""
        super().train(mode)
        self.target.eval()
        return self

    def counts(self, targets: torch.Tensor) -> torch.Tensor:
        """What the means are divided by: int64 [3, K], as `TrainedHeads.counts`, and for the target's loss; of targets
        int [T, K + 1]."""
        rows = targets[:, 0] != UNTRAINED
        counts = self.trained.counts(targets if self.heads.attends else targets[rows])
        return torch.cat([counts, rows.sum().cpu().expand(1, self.heads.config.num_heads)])

    def forward(
        self,
        input_ids: torch.Tensor,
        targets: torch.Tensor,
        tokens: torch.Tensor,
        counts: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Losses of a batch of texts.

        Args:
            input_ids: Int64 [B, T].
            targets: Int32 [B, T, K + 1], see `make_targets`.
            tokens: Int64 [B, T, K], what stands after each position.
            counts: [2, 3, K], where these are a piece of a larger batch: `counts` of the piece, and of the whole.

        Returns:
            `loss`; `losses` [K], each head's own mean; `target_loss`; of a piece, what it adds to them.
        """
        chosen = targets[..., 0] != UNTRAINED
        teacher = None
        if self.target_loss == "kl":
            with self.without_adapter():
                teacher = self.states(input_ids).h[chosen]
        states = self.states(input_ids, gradient=True)
        h = states.h[chosen]
        if teacher is not None:
            kept = linear_divergence(h, teacher, self.projection)
        else:
            kept = self._surprise(h, targets[chosen][:, 0])
        given = self.batch(states, targets, tokens)
        if counts is not None:
            given["counts"] = counts[:, :2]
            piece, whole = counts[:, 2, 0].to(kept.dtype)
            kept = kept * (piece / whole.clamp_min(1))
        out = self.trained(**given)
        loss = kept + self.heads_weight * out["loss"]
        return {"loss": loss, "losses": out["losses"], "target_loss": kept.detach()}

    def states(self, input_ids: torch.Tensor, *, gradient: bool = False) -> TargetStates:
        """Of the target as it is, the adapter on or off."""
        (backbone,) = self._backbone
        return backbone.states(input_ids, taps=self.trained.heads.taps, gradient=gradient)

    def batch(self, states: TargetStates, targets: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """As the heads read it: whole texts, or the positions at which decoding would draft."""
        if self.trained.heads.attends:
            found = {"h": states.h, "targets": targets, "tokens": tokens}
            return found if states.layers is None else found | {"layers": states.layers}
        rows = targets[..., 0] != UNTRAINED
        return {"h": states.h[rows], "targets": targets[rows], "tokens": tokens[rows]}

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Within it the target is as it was before."""
        layers = [layer for _, layer in adapted_layers(self.target)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def _surprise(self, h: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the target's next tokens [T], given h [T, H]."""
        own = self.projection
        return linear_cross_entropy(
            h.to(own.weight.dtype), own.weight, own.bias, truth.long(), scale=own.scale, softcap=own.softcap
        )

    @torch.no_grad()
    def measure(self, batches: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
        """What training did to the target and to its heads, on texts that it did not see.

        Args:
            batches: As `forward` takes them; read once.

        Returns:
            `positions`; `perplexity` of the target with and without the adapter, and by how much it changed;
            `divergence`, as in training; `same_choice`, the share of positions at which both choose the same token;
            `top1` of the heads, by head.
        """
        sums = {"without": 0.0, "adapted": 0.0, "divergence": 0.0, "same": 0.0, "positions": 0.0}
        ranks = measure_ranks(self.trained, self._measured(batches, sums))
        count = sums.pop("positions")
        means = {name: value / max(count, 1) for name, value in sums.items()}
        return {
            "positions": int(count),
            "perplexity_without": math.exp(means["without"]),
            "perplexity": math.exp(means["adapted"]),
            "perplexity_change": math.expm1(means["adapted"] - means["without"]),
            "divergence": means["divergence"],
            "same_choice": means["same"],
            "top1": accuracy(ranks, 1),
        }

    def _measured(
        self, batches: Iterable[Mapping[str, torch.Tensor]], sums: dict[str, float]
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Batches as the heads read them, while sums over their positions are added to `sums`."""
        for batch in batches:
            moved = {name: tensor.to(self.projection.weight.device) for name, tensor in batch.items()}
            rows = moved["targets"][..., 0] != UNTRAINED
            truth = moved["targets"][rows][:, 0]
            with self.without_adapter():
                before = self.states(moved["input_ids"]).h[rows]
            states = self.states(moved["input_ids"])
            after = states.h[rows]
            sums["without"] += float(self._surprise(before, truth)) * len(truth)
            sums["adapted"] += float(self._surprise(after, truth)) * len(truth)
            sums["divergence"] += float(linear_divergence(after, before, self.projection)) * len(truth)
            sums["same"] += sum(
                int((self._choices(a) == self._choices(b)).sum())
                for a, b in zip(before.split(CHOICES), after.split(CHOICES), strict=True)
            )
            sums["positions"] += len(truth)
            yield self.batch(states, moved["targets"], moved["tokens"])

    def _choices(self, h: torch.Tensor) -> torch.Tensor:
        return self.projection(h.to(self.projection.weight.dtype)).argmax(-1)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Of the heads and the adapter alone: the target is on the disk already."""
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        own = {name: name.removeprefix(prefix) for name in state}
        for name, bare in own.items():
            if not (bare.startswith("trained.") or ADAPTER in bare):
                del state[name]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The inverse of `state_dict`, strictly."""
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        missing = [name for name in result.missing_keys if name in self.state_dict()]
        if strict and (missing or result.unexpected_keys):
            raise RuntimeError(f"missing {missing}, surplus {result.unexpected_keys}")
        result.missing_keys[:] = missing
        return result
