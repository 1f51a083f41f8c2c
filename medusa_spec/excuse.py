"""When rounding may excuse a different token: the rule below float64. Knows logits and ids, no trees."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from medusa_spec.figures import first_difference

ALLOWANCE = 4.0
"""A tie may be as wide as this many times the target's own rounding noise."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where two outputs part, and whether rounding explains it.

    Attributes:
        position: Index of the first different token, counted from the first new one.
        gap: Difference between the target's two highest logits there, teacher-forced.
        noise: Largest difference, over the tokens up to there, between the logits of plain decoding and those of one
            full forward: what rounding alone does to this target on this text; at least the distance of two
            neighbouring numbers of its dtype there, which is all that it can tell apart.
    """

    position: int
    gap: float
    noise: float

    @property
    def excused(self) -> bool:
        """Whether the two highest logits lie closer than rounding can tell apart."""
        return self.gap < ALLOWANCE * self.noise


@torch.no_grad()
def explain(
    model: PreTrainedModel, prompt: torch.Tensor, plain: Sequence[int], drafted: Sequence[int]
) -> Difference | None:
    """Compares a drafted output with a plain one.

    A pass over N tokens rounds otherwise than N passes over one, so below float64 the arg-max may fall on the other
    side of a tie. Only there: the rule measures how far the target's own two ways of computing the same logits lie
    apart, and excuses a difference only where its two best tokens lie closer than `ALLOWANCE` times that.

    Args:
        model: The target, untouched or attached.
        prompt: Ids [1, T].
        plain: New tokens of plain greedy decoding.
        drafted: New tokens of tree decoding.

    Returns:
        None if the outputs are equal.
    """
    position = first_difference(plain, drafted)
    if position is None:
        return None
    text = torch.cat([prompt, torch.tensor([list(plain)], device=prompt.device)], dim=1)
    start = prompt.shape[1] - 1
    # The logits that chose each new token up to the difference: from one forward, and one by one from a cache.
    whole = model(text[:, : start + position + 1]).logits[0, start:].float()
    stepwise, cache = [], None
    for step in range(position + 1):
        ids = text[:, : start + 1] if step == 0 else text[:, start + step : start + step + 1]
        out = model(ids, cache=cache, use_cache=True)
        cache = out.cache
        stepwise.append(out.logits[0, -1].float())
    noise = float((torch.stack(stepwise) - whole).abs().max())
    top = stepwise[position].topk(2).values
    unit = torch.finfo(out.logits.dtype).eps * float(top[0].abs())
    return Difference(position=position, gap=float(top[0] - top[1]), noise=max(noise, unit))
