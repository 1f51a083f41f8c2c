"""What `medusa-spec plan` measures: drafts, the rest of a step, and memory. Reckons nothing."""

from typing import Any

import torch

from medusa_spec.cost import filled_cache
from medusa_spec.draft_times import draft_seconds_by_depth, first_draft_seconds, made_up_h, show
from medusa_spec.drafters import HeadsDrafter
from medusa_spec.economics import Costs
from medusa_spec.footprint import Footprint, cache_bytes, free_bytes, layer_states, module_bytes
from medusa_spec.model import MedusaModel

TOKENS = 32
"""Decoded to see what a step costs beside draft and pass."""


def measure_costs(
    model: MedusaModel, drafter: HeadsDrafter, passes: dict[int, float], *, prefix: int, repeats: int
) -> Costs:
    """Times of everything beside the passes.

    Args:
        model: Wrapped, with these heads.
        drafter: Of the heads.
        passes: T(N) by N.
        prefix: Tokens that heads which attend read at first.
        repeats: Drafts of every depth that count.
    """
    # One lap more: the first of heads that attend reads a whole prompt.
    drafts = draft_seconds_by_depth(drafter.heads, model.backbone, repeats=repeats + 1)
    reading = first_draft_seconds(drafter, prefix) - drafts[drafter.template.depth or max(drafts)]
    return Costs(passes=passes, drafts=drafts, rest=rest_seconds(model), reading=max(0.0, reading))


def rest_seconds(model: MedusaModel) -> float:
    """Seconds of a drafted step beside draft, pass and choice, which T(N) holds."""
    ids = torch.arange(16, device=model.device)[None] % model.backbone.ids_below
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, speculation="fixed", **settings)
    stats = model.last_stats
    assert stats is not None, "generate has just set it"
    return sum(stats.seconds[phase] for phase in ("lay_out", "keep", "rest")) / max(stats.passes, 1)


def measure_footprint(model: MedusaModel, drafter: HeadsDrafter, context: int) -> Footprint:
    """Bytes of heads and of a text of `context` tokens."""
    layers = layer_states(filled_cache(model.backbone, 1))
    session, h = drafter.begin([]), made_up_h(drafter)
    show(session, drafter, h, 2)
    session.draft(0, h, None)
    kept = session.bytes_per_token
    return Footprint(
        heads=module_bytes(drafter.heads),
        per_token=cache_bytes(layers, 1),
        heads_per_token=kept,
        context=context,
        cache=cache_bytes(layers, context) + context * kept,
        free=free_bytes(model.device),
    )
