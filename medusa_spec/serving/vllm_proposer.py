"""Medusa heads as a proposer of vLLM's plug-in, for versions that know no Medusa. Knows nothing of this library.

`medusa-spec export --to vllm-class` copies this file beside the heads; vLLM finds it with that folder in PYTHONPATH:

    {"method": "custom_class", "model": "vllm_proposer.MedusaHeads", "num_speculative_tokens": 4}

vLLM hands such a class the tokens of the texts, but not the hidden states that heads read. So the runner's method that
asks for drafts is wrapped: it shows the class the states before it goes on as ever. Written for vLLM 0.32 and 0.33.
"""

import functools
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

FOLDER = Path(__file__).parent
CONFIG_FILE, WEIGHTS_FILE = "config.json", "heads.safetensors"


class MedusaHeads:
    """Guesses a chain of tokens for every text, head k the one k + 1 places after the last.

    Args:
        vllm_config: vLLM's.

    Raises:
        ValueError: If more guesses are asked for than there are heads.
    """

    folder = FOLDER

    def __init__(self, vllm_config: Any) -> None:
        config = json.loads((self.folder / CONFIG_FILE).read_text(encoding="utf-8"))
        self.guesses, heads = vllm_config.speculative_config.num_speculative_tokens, config["num_heads"]
        if not 1 <= self.guesses <= heads:
            raise ValueError(f"num_speculative_tokens must be in 1..{heads}, one a head, got {self.guesses}")
        self.layers = config["num_hidden_layers"]
        self.asks_target = config["target_lm_head"]
        dtype, device = vllm_config.model_config.dtype, vllm_config.device_config.device
        self.tensors = {
            name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in load_file(self.folder / WEIGHTS_FILE).items()
            if not (self.asks_target and name == "lm_head.weight")
        }
        self.target: Any = None
        self.states: torch.Tensor | None = None
        self.drafted: list[int] | None = None
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        show_states(GPUModelRunner)

    def load_model(self, target: Any) -> None:
        """vLLM hands over the target when it is loaded; its LM head serves heads that have none of their own."""
        self.target = target

    def see(self, states: torch.Tensor, drafted: list[int] | None) -> None:
        """What the target computed in this step.

        Args:
            states: [rows, H], text after text: of each the state at its last token before the draft and at every token
                of the draft.
            drafted: Tokens in each text's draft; None if nothing was drafted.
        """
        self.states, self.drafted = states, drafted

    @torch.inference_mode()
    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """A chain for every text; none for one whose prompt is not read to its end.

        Args:
            sampled_token_ids: Tokens that each text gained in this step: the accepted ones and the bonus.
            *args: Not read.
            **kwargs: Not read.
        """
        if self.states is None or not sampled_token_ids:
            return [[] for _ in sampled_token_ids]
        rows, first = [], 0
        for text, tokens in enumerate(sampled_token_ids):
            rows.append(first + max(len(tokens), 1) - 1)  # the state from which the last token was chosen
            first += 1 + (self.drafted[text] if self.drafted is not None else 0)
        guesses = self.guess(self.states[rows])
        return [chain if tokens else [] for chain, tokens in zip(guesses, sampled_token_ids, strict=True)]

    def guess(self, h: torch.Tensor) -> list[list[int]]:
        """From states [B, H] to each one's chain of guesses; empty where this process is not told the logits."""
        chosen = []
        for k in range(self.guesses):
            logits = self.logits(k, self.features(k, h))
            if logits is None:
                return [[] for _ in h]
            best = logits.argmax(dim=-1)
            chosen.append(self.tensors["token_map"][best] if "token_map" in self.tensors else best)
        return torch.stack(chosen, dim=1).tolist()

    def features(self, k: int, x: torch.Tensor) -> torch.Tensor:
        """Head k's residual blocks, [B, H] to [B, H]."""
        for layer in range(self.layers):
            weight, bias = (self.tensors[f"blocks.{k}.layers.{layer}.{part}"] for part in ("weight", "bias"))
            x = x + torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias))
        return x

    def logits(self, k: int, z: torch.Tensor) -> torch.Tensor | None:
        """Features [B, H] to logits, by the target's LM head or by one in the file."""
        if self.asks_target:
            return self.target.compute_logits(z)
        weight = self.tensors.get("lm_head.weight")
        return torch.nn.functional.linear(z, self.tensors[f"lm_heads.{k}.weight"] if weight is None else weight)


def show_states(runner: Any) -> None:
    """Makes vLLM's runner show its hidden states to a drafter of this file; done once, however often it is called."""
    original = runner.propose_draft_token_ids
    if getattr(original, "shows_states", False):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.drafter, MedusaHeads):
            given = signature.bind(self, *args, **kwargs).arguments
            drafts = given["spec_decode_metadata"]
            self.drafter.see(given["sample_hidden_states"], None if drafts is None else list(drafts.num_draft_tokens))
        return original(self, *args, **kwargs)

    propose_draft_token_ids.shows_states = True  # type: ignore[attr-defined]
    runner.propose_draft_token_ids = propose_draft_token_ids
