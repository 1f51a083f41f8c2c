"""Train heads for a model on your own conversations, then decode with them.

python examples/finetune_heads.py MODEL CHATS.jsonl OUTPUT_FOLDER

Each line of CHATS.jsonl holds {"messages": [{"role": "user", "content": …}, …]}; answers that the
model wrote itself train the best heads. Interrupted, the same command goes on where it was.
"""

import sys
from typing import Any

from transformers import AutoTokenizer

from medusa_spec import MedusaModel
from medusa_spec.finetune import FinetuneConfig, run_pipeline


def main(name: str, data: str, output: str, **settings: Any) -> list[int]:
    """Run all stages, load the heads from their folder and continue one question."""
    run = run_pipeline(FinetuneConfig(model=name, data=(data,), output=output, **settings))

    heads = str(run / "heads")  # the base model's name is in the folder
    model = MedusaModel.from_pretrained(heads)
    tokenizer = AutoTokenizer.from_pretrained(name)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who are you?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output_ids = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    print(tokenizer.decode(output_ids[0], skip_special_tokens=True))
    print(f"mu {model.last_stats.mu:.2f}; see {run / 'report' / 'report.md'}")
    return output_ids[0].tolist()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
