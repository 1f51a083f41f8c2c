"""The report as text."""

from medusa_spec.finetune.report_text import (
    accuracy_table,
    data_lines,
    loop_line,
    report_text,
    training_lines,
    tree_table,
)

FIGURES = {
    "calibration": {"top1": [0.5, 0.25], "top5": [0.75, 0.5], "expected_mu": [0.0, 0.5, 0.7], "tree_size": 2},
    "training": {
        "data": {
            "train": {"conversations": 90, "answer_tokens": 1000},
            "held_out": {"conversations": 10, "answer_tokens": 100},
        },
        "steps": 12,
        "draft_coverage": 0.976,
        "expected_mu": {"1": 0.5},
    },
    "loops": {"looping": 1, "of": 4, "mu": 0.4, "tau": 1.4},
}


def test_every_figure_is_told() -> None:
    text = report_text(FIGURES, "THE TABLE", ["loss.png"])
    for part in ("90", "1000", "12 steps", "97.6%", "2 draft nodes", "THE TABLE", "![loss.png](loss.png)"):
        assert part in text


def test_tables_have_a_row_for_each_head_and_size() -> None:
    assert accuracy_table(FIGURES["calibration"]).splitlines()[2:] == ["| 0 | 0.500 | 0.750 |", "| 1 | 0.250 | 0.500 |"]
    assert tree_table([0.0, 0.5, 0.7], {"1": 0.5, "2": 0.7}).splitlines()[2:] == ["| 1 | 0.500 |", "| 2 | 0.700 |"]


def test_overlap_and_held_out_coverage_are_told_where_they_are_known() -> None:
    calibration = FIGURES["calibration"] | {"overlap": [0.4, 0.2]}
    assert accuracy_table(calibration).splitlines()[::2] == [
        "| head | top-1 | top-5 | overlap |",
        "| 0 | 0.500 | 0.750 | 0.400 |",
    ]
    training = FIGURES["training"] | {"held_out_draft_coverage": 0.961}
    text = report_text(FIGURES | {"training": training}, "THE TABLE", [])
    assert "97.6% of the answer tokens, and 96.1% of those held out." in text
    assert "97.6% of the answer tokens.\n" in report_text(FIGURES, "THE TABLE", [])


def test_what_was_seen_in_training_is_told_and_nothing_else() -> None:
    history = [
        {"step": 5, "loss": 2.0, "masked_batches": 2},
        {"step": 10, "decoder_mu": 0.2, "decoder_seconds": 1.6},
        {"step": 15, "loss": 2.0, "masked_batches": 1},
        {"step": 20, "decoder_mu": 0.4, "decoder_seconds": 1.6},
    ]
    decoder, masked = training_lines(history)
    assert "μ 0.200 at step 10, 0.400 at the end (3 s in all)" in decoder and masked.endswith(": 3.")
    assert decoder in report_text(FIGURES | {"history": history}, "", [])
    assert training_lines([{"step": 5, "loss": 2.0}]) == []


def test_loops_are_told_apart() -> None:
    assert "1 of 4" in loop_line(FIGURES["loops"]) and "0.400" in loop_line(FIGURES["loops"])
    assert loop_line({"looping": 3, "of": 3}).startswith("All 3 answers")


DATA = {
    "records": 20,
    "cut": 3,
    "skipped": 0,
    "duplicates": 2,
    "unfinished": 0,
    "answers": {"read": 30, "cut": 1, "weightless": 0, "rewritten": 4, "looping": 5},
    "template": {"system turn merged into the first user turn": 6},
    "unusable": {"records": 1, "first": ["a.jsonl:7: a record must have"]},
    "settings": {"max_length": 64},
}


def test_what_was_cut_or_left_out_is_told_and_nothing_else() -> None:
    first, lines = data_lines(DATA)
    assert first == "Of 20 records with 30 answers:"
    assert lines.split("\n") == [
        "- conversations cut at 64 tokens: 3",
        "- conversations that are copies of others, kept: 2",
        "- records that could not be used, left out: 1",
        "- answers cut off, or behind the first 64 tokens: 1",
        "- answers that end in repetition, which is easy to guess, trained on all the same: 5",
        "- answers not trained on, since the chat template shows them differently later: 4",
        "- system turn merged into the first user turn: 6",
        "- left out: a.jsonl:7: a record must have",
    ]
    settings = DATA["settings"] | {"drop_loops": True, "drop_duplicates": True}
    assert data_lines(DATA | {"settings": settings})[1].count("left out") == 4
    assert lines in report_text(FIGURES | {"data": DATA}, "", [])


def test_data_of_which_nothing_was_left_out_or_counted_are_passed_over() -> None:
    nothing = {name: 0 for name in ("cut", "skipped", "duplicates", "unfinished")} | {"template": {}}
    nothing |= {"answers": DATA["answers"] | {"cut": 0, "rewritten": 0, "looping": 0}}
    assert data_lines(DATA | nothing | {"unusable": {"records": 0, "first": []}}) == data_lines({"cut": 3}) == []


def test_what_became_of_an_adapted_target_is_told() -> None:
    target = {
        "positions": 50,
        "perplexity": 3.0,
        "perplexity_without": 2.97,
        "perplexity_change": 0.0101,
        "same_choice": 0.95,
        "divergence": 0.0123,
        "top1": [0.6, 0.4],
        "top1_before": [0.5, 0.3],
    }
    text = report_text(FIGURES | {"training": FIGURES["training"] | {"target": target}}, "THE TABLE", [])
    assert "| perplexity of held-out answers | 2.9700 | 3.0000 (+1.01%) |" in text
    assert "| 0.500, 0.300 | 0.600, 0.400 |" in text and "at 95.00% of 50 positions" in text and "0.0123 nats" in text
    assert "adapted" not in report_text(FIGURES, "THE TABLE", [])
