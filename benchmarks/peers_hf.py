"""Hugging Face's generate, plain or assisted, for `peers_worker.py`."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class Passes(BaseStreamer):
    """Notes how many tokens each pass gave: assisted generation hands them over pass by pass, after the prompt."""

    def __init__(self) -> None:
        self.spans: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Notes one pass."""
        self.spans.append(value.numel())

    def end(self) -> None:
        """Nothing is left to do."""


class HuggingFace:
    """An untouched load and the arguments that choose how it is assisted; none is plain decoding."""

    def __init__(self, model: Any, arguments: dict[str, Any]) -> None:
        self.model, self.arguments = model, arguments
        self.facts = {"engine": f"transformers {transformers.__version__}"}
        self._asked, self._passes = 0, Passes()

    def generate(self, ids: list[int], max_new_tokens: int) -> torch.Tensor:
        """Ids [1, T] of prompt and answer."""
        self._asked, self._passes = len(ids), Passes()
        inputs = torch.tensor([ids])
        told = {"streamer": self._passes} if self.arguments else {}
        return self.model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            **self.arguments,
            **told,
        )

    def read(self, output: torch.Tensor) -> dict[str, Any]:
        """How many passes had a draft is not told."""
        _, _, *later = self._passes.spans or (0, 0)  # the prompt itself, then what its own pass gave
        counters = {"passes": len(later), "gained": sum(later), "drafts": None, "accepted": None}
        return {"tokens": output[0, self._asked :].tolist(), "counters": counters if self.arguments else None}


def load(settings: dict[str, Any]) -> HuggingFace:
    """Settings: `model`, `threads`, `arguments` for generate."""
    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16).eval()
    return HuggingFace(model, settings["arguments"])
