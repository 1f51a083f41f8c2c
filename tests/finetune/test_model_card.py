"""The model card."""

from dataclasses import replace

import pytest

from medusa_spec.checkpoint import CARD_NAME, heads_folder, packaged_heads, read_config
from medusa_spec.config import MedusaConfig
from medusa_spec.finetune.model_card import model_card
from medusa_spec.heads import HeadsConfig

HEADS = HeadsConfig(hidden_size=8, vocab_size=100, num_heads=3, draft_vocab_size=40)
TRAINING = {
    "data": {
        "sources": {"maths": 7, "chat": 3},
        "licenses": {"MIT": 10},
        "train": {"conversations": 9, "answer_tokens": 500},
    },
    "recipe": {"learning_rate": 0.001, "epochs": 6},
    "held_out": {"positions": 50, "top1": [0.5], "top5": [0.75]},
    "expected_mu": {"7": 0.7},
}
MEASURED = {"prompts": 4, "mu": 0.61, "tau": 1.55, "speedup": {"tree/hf": {"value": 1.8, "low": 1.6, "high": 2.0}}}


def test_the_card_tells_base_data_licences_recipe_and_figures() -> None:
    config = MedusaConfig(heads=HEADS, base_model_name_or_path="org/base", training=TRAINING | {"measured": MEASURED})
    card = model_card(config)
    assert card.startswith("---\n") and "base_model: org/base\n" in card
    for part in ("`maths`: 7", "licence MIT: 10", "| learning_rate | 0.001 |", "top-1 by head: 0.500", "0.70 (7)"):
        assert part in card
    assert "μ 0.610, τ 1.550" in card and "tree/hf: 1.80 (95 %: 1.60 to 2.00)" in card


def test_the_card_tells_acceptance_equality_and_what_it_was_measured_on() -> None:
    machine = {"device": "a CPU", "threads": 2, "dtype": "bfloat16", "system": "Linux", "python": "3.11"}
    measured = MEASURED | {
        "accepted_marginal": [0.5, 0.25],
        "accepted_conditional": [0.5, 0.5],
        "equal": {"tree/hf": {"equal": 3, "of": 4, "first_differences": [7]}},
        "machine": machine | {"versions": {"torch": "2.14", "transformers": "5.24", "peft": None}},
        "without_loops": {"looping": 1, "of": 4, "mu": 0.55, "tau": 1.5},
    }
    data = TRAINING["data"] | {"held_out": {"conversations": 4}}
    training = TRAINING | {"data": data, "measured": measured, "draft_coverage": 0.98, "held_out_draft_coverage": 0.91}
    card = model_card(MedusaConfig(heads=HEADS, training=training))
    for line in (
        "9 conversations, 500 answer tokens; loss on answers only. Held out: 4 conversations.",
        "- the draft vocabulary covers 98.0% of the training tokens, 91.0% of the held-out tokens",
        "- without the 1 answers that end in repetition: μ 0.550, τ 1.500",
        "- accepted at depth 1, 2, … of all drafts: 0.500, 0.250",
        "- accepted at depth 1, 2, … if the node above was: 0.500, 0.500",
        "- same output tree/hf: 3 of 4",
        "- measured on a CPU, 2 threads, bfloat16; Linux; Python 3.11, torch 2.14, transformers 5.24\n",
    ):
        assert line in card


def test_overlap_is_told_where_it_is_known() -> None:
    held_out = TRAINING["held_out"] | {"overlap": [0.4, 0.2]}
    card = model_card(MedusaConfig(heads=HEADS, training=TRAINING | {"held_out": held_out}))
    assert "overlap with the base model's probabilities by head: 0.400, 0.200" in card
    assert "overlap" not in model_card(MedusaConfig(heads=HEADS, training=TRAINING))


def test_what_is_not_known_is_left_out() -> None:
    card = model_card(MedusaConfig(heads=HEADS))
    assert "base_model" not in card and "Training data" not in card and "None" not in card


def test_an_adapter_of_heads_names_them_and_what_it_gained() -> None:
    held_out = TRAINING["held_out"] | {"base_top1": [0.4]}
    card = model_card(MedusaConfig(heads=HEADS, training=TRAINING | {"held_out": held_out}, base_heads="org/heads"))
    assert "This is an adapter (LoRA) on the heads `org/heads`" in card and "model.set_adapter" in card
    assert "top-1 by head without the adapter: 0.400" in card
    assert "`heads`" in model_card(MedusaConfig(heads=HEADS, base_heads="/home/somebody/heads"))  # no paths


def test_heads_of_an_adapted_target_say_whose_output_it_is() -> None:
    target = {
        "positions": 50,
        "perplexity": 3.0,
        "perplexity_without": 2.97,
        "perplexity_change": 0.0101,
        "same_choice": 0.95,
    }
    config = MedusaConfig(heads=HEADS, base_model_name_or_path="org/base", target_adapter_hash="ab")
    card = model_card(replace(config, training=TRAINING | {"target": target}))
    assert "3 heads of the family medusa" in card and "the *adapted* base model checks them" in card
    assert "Output is exactly that of the adapted model, *not* that of org/base." in card
    assert "is 3.000, without the adapter 2.970 (+1.01%); the greedy choice is the same at 95.0% of them" in card
    assert "its output does not change" not in card and "its output does not change" in model_card(
        replace(config, target_adapter_hash=None)
    )


@pytest.mark.parametrize("name", packaged_heads())
def test_packaged_heads_have_the_card_that_they_would_get(name: str) -> None:
    folder = heads_folder(name)
    assert (folder / CARD_NAME).read_text(encoding="utf-8") == model_card(read_config(folder))
