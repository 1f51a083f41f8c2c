"""Draws for rows that run ahead of one another are those of plain sampling of the batch."""

import random

import pytest
import torch

from medusa_spec import noise
from medusa_spec.noise import SharedNoise

ROWS, VOCAB, POSITIONS = 3, 97, 12


def plain(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [positions, rows], and the random state behind them."""
    torch.manual_seed(3)
    tokens = [torch.multinomial(torch.softmax(step, -1), 1)[:, 0] for step in logits]
    return torch.stack(tokens), torch.get_rng_state()


@pytest.mark.parametrize("most_bytes", [1 << 28, 3000, 1], ids=["all", "some", "one"])
@pytest.mark.parametrize("seed", range(8))
def test_rows_draw_what_plain_sampling_draws_in_whatever_order_they_ask(monkeypatch, most_bytes, seed):
    monkeypatch.setattr(noise, "MOST_BYTES", most_bytes)
    logits = torch.randn(POSITIONS, ROWS, VOCAB)
    expected, state = plain(logits)
    dice, lengths = random.Random(seed), [POSITIONS, POSITIONS - 4, 1]
    torch.manual_seed(3)
    shared = SharedNoise(ROWS)
    rules, found = [shared.rule(row) for row in range(ROWS)], [[], [], []]
    while unfinished := [row for row in range(ROWS) if len(found[row]) < lengths[row]]:
        row = dice.choice(unfinished)
        found[row].append(rules[row].choose(logits[len(found[row]), row][None]))
        if len(found[row]) == lengths[row]:
            shared.end(row)
        assert len(shared._noise) <= max(1, most_bytes // (ROWS * VOCAB * 4))
    assert all(tokens == expected[: len(tokens), row].tolist() for row, tokens in enumerate(found))
    assert torch.equal(torch.get_rng_state(), state)
    assert not shared._states and not shared._noise  # nothing is kept of what no row will ask for


def test_nothing_to_draw_from_is_an_error_as_in_plain_sampling():
    nothing = torch.full((1, VOCAB), -torch.inf)
    with pytest.raises(RuntimeError, match="probability tensor"):
        torch.multinomial(torch.softmax(nothing, -1), 1)
    with pytest.raises(RuntimeError, match="probability tensor"):
        SharedNoise(2).rule(1).choose(nothing)
