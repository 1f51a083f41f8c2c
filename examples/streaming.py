"""Text as it is decoded, through any of Hugging Face's streamers.

python examples/streaming.py [MODEL]
"""

import sys

from transformers import AutoTokenizer, TextStreamer

from medusa_spec import MedusaModel
from medusa_spec.default_model import default_model_path


def main(name: str, question: str = "Write a short story about a paper boat.") -> None:
    """Print a story while it is written; several words come at once where a draft was right."""
    model = MedusaModel.from_pretrained(name, drafter="ngram")
    tokenizer = AutoTokenizer.from_pretrained(name)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(**inputs, max_new_tokens=128, do_sample=False, streamer=streamer)


if __name__ == "__main__":
    main(*(sys.argv[1:] or [str(default_model_path())]))
