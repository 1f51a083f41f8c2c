"""LM heads over all V tokens, as formats without a draft vocabulary want them. Knows no format.

Engines take the likeliest token of a head and nothing else. So a draft vocabulary can be written into an LM head of V
rows without changing a single guess: each row outside of it is the mean of the rows inside, whose logit is the mean of
theirs and never the largest.
"""

import torch

from medusa_spec.heads import DraftHeads


def full_rows(weight: torch.Tensor, draft_ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Rows of a draft vocabulary as those of all V tokens.

    ```
    draft_ids 1, 3      weight  a          rows  (a + b) / 2
                                b                a
                                                 (a + b) / 2
                                                 b
    ```

    Args:
        weight: [draft vocabulary, H].
        draft_ids: Int64 [draft vocabulary]; None leaves `weight`, which has V rows, as it is.
        vocab_size: V.

    Returns:
        [V, H]. The largest logit is that of the same token as before, and none outside comes near it.
    """
    if draft_ids is None:
        return weight
    mean = weight.double().mean(dim=0).to(weight.dtype)
    rows = mean.expand(vocab_size, -1).clone()
    rows[draft_ids.to(rows.device)] = weight
    return rows


def shared_lm_head(heads: DraftHeads) -> torch.Tensor:
    """The one LM head [V, H] of heads that share the target's.

    With a draft vocabulary it is no longer the target's own, so the target's factor on logits is put into it, as into
    all LM heads that are not.
    """
    weight = heads.projection.weight
    if heads.draft_ids is None:
        return weight
    return full_rows(_scaled(weight, heads), heads.draft_ids, heads.config.vocab_size)


def each_lm_head(heads: DraftHeads, *, cut: bool = False) -> list[torch.Tensor]:
    """An LM head for each head, whatever they are stored as; low-rank additions are added up.

    Args:
        heads: Medusa heads.
        cut: Leave a draft vocabulary's rows as they are; otherwise all are [V, H].
    """
    own = [_scaled(_own(heads, k), heads) for k in range(heads.config.num_heads)]
    return own if cut else [full_rows(weight, heads.draft_ids, heads.config.vocab_size) for weight in own]


def _own(heads: DraftHeads, k: int) -> torch.Tensor:
    head = heads.head(k)
    if hasattr(head, "lm_head"):
        return head.lm_head.weight.detach()
    weight = heads.projection.weight
    if not hasattr(head, "up"):
        return weight
    return (weight.double() + head.up.weight.detach().double() @ head.down.weight.detach().double()).to(weight.dtype)


def _scaled(weight: torch.Tensor, heads: DraftHeads) -> torch.Tensor:
    scale = heads.projection.scale
    return weight if scale == 1.0 else (weight.double() * scale).to(weight.dtype)


def has_bias(heads: DraftHeads) -> bool:
    """Whether an LM head adds anything to its product: formats without biases cannot say so."""
    if heads.config.lm_head != "own":
        return heads.projection.bias is not None and bool(heads.projection.bias.any())
    biases = [heads.head(k).lm_head.bias for k in range(heads.config.num_heads)]
    return any(bias is not None and bool(bias.any()) for bias in biases)
