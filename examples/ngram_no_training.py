"""No heads, no training: drafts are looked up in the text itself. Good where answers quote it.

python examples/ngram_no_training.py [MODEL]
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_spec import MedusaModel
from medusa_spec.default_model import default_model_path

TASK = """Correct the spelling and repeat the text:

The lighthouse keeper climbed the stairs every evening to light the lamp. In winter the wind
shook the lighthouse, and the lighthouse keeper climbd the stairs with one hand on the wall."""


def main(name: str) -> tuple[list[int], list[int]]:
    """Wrap a model that is in memory; give the output with drafts and without."""
    target = AutoModelForCausalLM.from_pretrained(name)
    model = MedusaModel(target, drafter="ngram")
    tokenizer = AutoTokenizer.from_pretrained(name)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": TASK}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=96, do_sample=False)
    stats = model.last_stats
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(f"{stats.new_tokens} tokens in {stats.passes} passes of the model")

    model.detach()  # gives the model back as it was
    plain = target.generate(**inputs, max_new_tokens=96, do_sample=False)
    return output[0].tolist(), plain[0].tolist()


if __name__ == "__main__":
    main(*(sys.argv[1:] or [str(default_model_path())]))
