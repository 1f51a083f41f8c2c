"""Acceptance in the real decoder while heads are trained: a few held-out prompts, a chain. Knows no trainer."""

import time
from copy import deepcopy
from typing import Any

import torch

from medusa_spec.finetune.config import FinetuneConfig
from medusa_spec.finetune.target import Target
from medusa_spec.finetune.tokens import TokenData
from medusa_spec.heads import DraftHeads
from medusa_spec.model import MedusaModel
from medusa_spec.stats import DecodingStats
from medusa_spec.tree import chain_template


class DecoderWatch:
    """Decodes prompts with heads as they are, drafting each head's first guess.

    A chain, since the best tree is known only after calibration: its μ is below that of the tree that will be used, but
    the same from epoch to epoch, and its acceptance by depth is each head's.

    Args:
        target: Whose backbone is let go of while prompts are decoded, and attached again when next asked for.
        prompts: Int [T] each.
        new_tokens: Decoded per prompt.
    """

    def __init__(self, target: Target, prompts: list[torch.Tensor], new_tokens: int) -> None:
        self.target, self.prompts, self.new_tokens = target, prompts, new_tokens

    def measure(self, heads: DraftHeads) -> dict[str, float]:
        """Figures for the log; heads, random state and target are left as they were.

        Returns:
            `decoder_mu`; `decoder_depth_1` …, the share of drafts whose node of that depth was accepted;
            `decoder_seconds`.
        """
        if not self.prompts:
            return {}
        began = time.perf_counter()
        with torch.random.fork_rng():
            stats = self._decode(frozen_copy(heads))
        drafts = max(stats.drafted_passes, 1)
        shares = {f"decoder_depth_{d}": round(n / drafts, 4) for d, n in enumerate(stats.accepted_by_depth, start=1)}
        return {"decoder_mu": round(stats.mu, 4), **shares, "decoder_seconds": round(time.perf_counter() - began, 2)}

    def _decode(self, heads: DraftHeads) -> DecodingStats:
        tree = chain_template(heads.config.num_heads)
        # Probed when it was attached for the states; prepared it would be faster after seconds of preparing.
        asked: dict[str, Any] = {"tree": tree, "speculation": "fixed", "probe": False, "prepare": False}
        wrapped = MedusaModel(self.target.release(), heads, **asked)
        total = DecodingStats()
        try:
            for prompt in self.prompts:
                ids = prompt.long()[None].to(wrapped.backbone.device)
                asked = {"do_sample": False, "max_new_tokens": self.new_tokens, **self._stops()}
                wrapped.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **asked)
                assert wrapped.last_stats is not None
                total = total.merge(wrapped.last_stats)
        finally:
            wrapped.detach()
        return total

    def _stops(self) -> dict[str, Any]:
        ids = sorted(self.target.eos_ids)
        return {"eos_token_id": ids, "pad_token_id": ids[0]} if ids else {}


def decoder_watch(config: FinetuneConfig, target: Target, data: TokenData, longest: int | None) -> DecoderWatch:
    """A watch over as many held-out prompts as `config` says, spread evenly over the split.

    Args:
        config: Counts.
        target: The run's.
        data: The held-out split, whose first answers give the prompts' ends.
        longest: Positions that the target has; None for any number.
    """
    room = None if longest is None else longest - config.eval_new_tokens
    ends = [int(conversation.mask.to(torch.uint8).argmax()) for conversation in data]  # plain text has no prompt
    usable = [number for number, end in enumerate(ends) if 0 < end and (room is None or end <= room)]
    count = min(config.eval_prompts, len(usable))
    chosen = [usable[place * len(usable) // count] for place in range(count)]
    return DecoderWatch(target, [data[n].input_ids[: ends[n]].clone() for n in chosen], config.eval_new_tokens)


def frozen_copy(heads: DraftHeads) -> DraftHeads:
    """The same heads for decoding; the target's LM head and embeddings are shared with them, weights are not."""
    shared = {id(part): part for part in (heads.projection, heads.embedding)}
    return deepcopy(heads, shared).requires_grad_(False).eval()
