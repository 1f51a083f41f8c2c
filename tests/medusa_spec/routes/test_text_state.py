"""A text that is read as `generate` reads it, and copies of it that leave it alone."""

import pytest
import torch

from medusa_spec.backbone import Backbone
from medusa_spec.routes.text_state import TextState


@pytest.mark.parametrize("name", ["bloom", "mamba", "rwkv", "qwen3_next"])
def test_reading_token_by_token_is_what_generate_does(make_other, name) -> None:
    model = make_other(name)
    prompt = torch.arange(5, 14)[None]
    answer = model.generate(prompt, max_new_tokens=8, do_sample=False)
    state = TextState(Backbone(model))
    ids = prompt
    for _ in range(8):
        token = state.read(ids, last_only=True).logits[0, -1].argmax()
        ids = token[None, None]
    assert torch.equal(torch.cat([state.ids, ids], dim=1), answer)


@pytest.mark.parametrize("name", ["bloom", "mamba", "qwen3_next"])
def test_rows_are_copies_in_any_order(make_other, name) -> None:
    state = TextState(Backbone(make_other(name)))
    state.read(torch.arange(5, 14)[None])
    branches = state.rows([0, 0])
    first = branches.read(torch.tensor([[20], [30]])).logits
    swapped = branches.rows([1, 0, 1])
    assert swapped.ids[:, -1].tolist() == [30, 20, 30]
    second = swapped.read(torch.tensor([[40], [40], [41]])).logits
    assert state.ids.shape == (1, 9), "the state itself was left alone"
    for row, path in enumerate(([30, 40], [20, 40], [30, 41])):
        alone = state.rows([0])
        one, two = (alone.read(torch.tensor([[token]])).logits for token in path)
        torch.testing.assert_close(one[0], first[[1, 0, 1][row]], rtol=0, atol=1e-6)
        torch.testing.assert_close(two[0], second[row], rtol=0, atol=1e-6)


def test_h_and_layers_of_what_was_read_are_returned(make_other) -> None:
    out = TextState(Backbone(make_other("bloom"))).read(torch.arange(5, 14)[None], taps=(0, 1))
    assert out.layers is not None and out.layers.shape == (1, 9, 2, 32) and out.h.shape == (1, 9, 32)
