"""Wrap a model in trained heads and decode: the same tokens as plain decoding, in fewer passes.

python examples/wrap_and_generate.py [MODEL HEADS]
"""

import sys

from transformers import AutoTokenizer

from medusa_spec import MedusaModel
from medusa_spec.default_model import default_model_path

QUESTION = "Why does bread rise? Answer in three sentences."


def main(name: str, heads: str) -> tuple[list[int], list[int]]:
    """Decode with the tree and plainly; give both outputs."""
    model = MedusaModel.from_pretrained(name, heads=heads)
    tokenizer = AutoTokenizer.from_pretrained(name)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=96, do_sample=False)
    stats = model.last_stats
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(f"{stats.new_tokens} tokens in {stats.passes} passes of the model: mu {stats.mu:.2f}")

    plain = model.generate(**inputs, max_new_tokens=96, do_sample=False, draft_nodes=0)
    print("same as plain decoding:", plain.tolist() == output.tolist())
    return output[0].tolist(), plain[0].tolist()


if __name__ == "__main__":
    main(*(sys.argv[1:] or [str(default_model_path()), "smollm2-135m"]))
