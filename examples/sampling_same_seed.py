"""Sampling is exact too: the same seed gives the tokens that the model's own generate gives.

python examples/sampling_same_seed.py [MODEL]
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_spec import MedusaModel
from medusa_spec.default_model import default_model_path

SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "max_new_tokens": 48}


def main(name: str, seeds: int = 3) -> list[tuple[list[int], list[int]]]:
    """Sample with drafts and without, seed by seed; give both outputs of each."""
    # In float64 rounding cannot tip a draw; in bfloat16 it can, once in a long while.
    target = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(name)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name three uses of a brick, and three of a feather."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    pairs = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        plain = target.generate(**inputs, **SAMPLING)
        model = MedusaModel(target, drafter="ngram")
        torch.manual_seed(seed)
        drafted = model.generate(**inputs, **SAMPLING)
        model.detach()
        print(f"seed {seed}: same tokens: {plain.tolist() == drafted.tolist()}")
        pairs.append((plain[0].tolist(), drafted[0].tolist()))
    return pairs


if __name__ == "__main__":
    main(*(sys.argv[1:] or [str(default_model_path())]))
