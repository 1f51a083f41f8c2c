"""vLLM's offline decoding, plain or speculative, for `peers_worker.py`. Runs in vLLM's environment."""

from typing import Any

import vllm
from vllm import LLM, SamplingParams


class Vllm:
    """An engine that decodes one request at a time."""

    def __init__(self, model: LLM, *, drafts: bool) -> None:
        self.model, self.drafts = model, drafts
        self.facts = {"engine": f"vLLM {vllm.__version__}"}
        self._seen = self._counted()

    def generate(self, ids: list[int], max_new_tokens: int) -> Any:
        """The request's output. Nothing is made text, as in the other ways."""
        sampling = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, detokenize=False)
        return self.model.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)[0]

    def read(self, output: Any) -> dict[str, Any]:
        """The engine counts from its start on: what is told is the difference."""
        before, self._seen = self._seen, self._counted()
        tokens = list(output.outputs[0].token_ids)
        drafts, accepted = (now - then for now, then in zip(self._seen, before, strict=True))
        passes = max(len(tokens) - 1 - accepted, drafts)  # each gives one token of its own
        counters = {"passes": passes, "gained": len(tokens) - 1, "drafts": drafts, "accepted": accepted}
        return {"tokens": tokens, "counters": counters if self.drafts else None}

    def _counted(self) -> tuple[int, int]:
        """Passes with a draft, and accepted draft tokens, so far."""
        if not self.drafts:
            return 0, 0
        count = {metric.name: metric for metric in self.model.get_metrics() if "spec_decode" in metric.name}
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        drafts, accepted = (int(count[name].value) if name in count else 0 for name in names)
        return drafts, accepted


def load(settings: dict[str, Any]) -> Vllm:
    """Settings: `model`, `speculative` (vLLM's config, or null), `max_model_len`, `eager`."""
    model = LLM(
        model=settings["model"],
        dtype="bfloat16",
        speculative_config=settings["speculative"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=1,
        enforce_eager=settings["eager"],
        enable_prefix_caching=False,  # no way keeps a prompt of before
        disable_log_stats=False,
        seed=0,
    )
    return Vllm(model, drafts=settings["speculative"] is not None)
