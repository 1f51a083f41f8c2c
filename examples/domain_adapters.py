"""Two domains on one set of heads: adapters that are swapped between requests, nothing loaded again.

python examples/domain_adapters.py org/base-model my-heads/heads maths=maths/heads code=code/heads
"""

import sys

from transformers import AutoTokenizer

from medusa_spec import MedusaModel

PROMPTS = {
    "maths": "A train leaves at 3 and drives 120 km at 60 km/h. When does it arrive? Explain step by step.",
    "code": "Write a Python function that returns the longest word of a text.",
}


def main(model_name: str, heads: str, **adapters: str) -> dict[str, dict[str, tuple[list[int], float]]]:
    """Decodes a prompt of each domain with every adapter, and with none.

    Returns:
        By domain of the prompt and name of the adapter (`"none"` for the heads alone): the ids, which are the same
        whatever is active, and the mean of accepted draft tokens per drafted pass, which is not.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = MedusaModel.from_pretrained(model_name, heads=heads)
    for name, folder in adapters.items():
        model.load_adapter(folder, name)
    found: dict[str, dict[str, tuple[list[int], float]]] = {}
    for domain, prompt in PROMPTS.items():
        turns = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        for name in (*adapters, "none"):
            model.disable_adapters() if name == "none" else model.set_adapter(name)
            output = model.generate(**inputs, max_new_tokens=128, do_sample=False)
            found.setdefault(domain, {})[name] = output[0].tolist(), model.last_stats.mu
    return found


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[3:])
    for domain, by_name in main(sys.argv[1], sys.argv[2], **given).items():
        for name, (_, mu) in by_name.items():
            print(f"{domain:8} with {name:8} mu {mu:.2f}")
