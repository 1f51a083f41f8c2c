"""This project's decoding, plain or with a drafter, for `peers_worker.py`."""

from typing import Any

import torch

from medusa_spec import MedusaModel


class Ours:
    """A wrapped model; without drafts where it is to decode plainly."""

    def __init__(self, model: MedusaModel, *, plain: bool) -> None:
        self.model, self.arguments = model, {"draft_nodes": 0} if plain else {}
        self.facts = {"engine": "medusa-spec", "prepared": model.prepared.reason}
        self._asked = 0

    def generate(self, ids: list[int], max_new_tokens: int) -> torch.Tensor:
        """Ids [1, T] of prompt and answer."""
        self._asked = len(ids)
        inputs = torch.tensor([ids])
        mask = torch.ones_like(inputs)
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens} | self.arguments
        return self.model.generate(inputs, attention_mask=mask, **options)

    def read(self, output: torch.Tensor) -> dict[str, Any]:
        """All is counted."""
        stats = self.model.last_stats
        assert stats is not None  # generate has just set it
        counters = {"passes": stats.passes, "gained": stats.new_tokens - stats.requests}
        counters |= {"drafts": stats.drafted_passes, "accepted": stats.accepted}
        return {"tokens": output[0, self._asked :].tolist(), "counters": counters}


def load(settings: dict[str, Any]) -> Ours:
    """Settings: `model`, `threads`, `drafter` (a name, or "plain"), `heads` (or null)."""
    torch.set_num_threads(settings["threads"])
    plain = settings["drafter"] == "plain"
    model = MedusaModel.from_pretrained(
        settings["model"],
        heads=settings["heads"],
        drafter="ngram" if plain else settings["drafter"],  # one that needs nothing, and is not asked
        speculation="auto",
        dtype=torch.bfloat16,
    )
    return Ours(model, plain=plain)
