"""The heads' own decoder layer is the one that targets are made of."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from medusa_spec.heads.draft_layer import DraftAttention, DraftLayer, angles_of, rotated
from medusa_spec.heads.sizes import LayerSizes
from medusa_spec.heads.view import UnrolledView

H = 24
SIZES = LayerSizes(num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=40, rope_theta=500.0)


def made(**arguments):
    layer = DraftLayer(H, SIZES.filled(H), **arguments).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def text_view(batch, rows):
    return UnrolledView(batch, rows, torch.device("cpu")).next()


def test_a_fresh_layer_is_the_identity():
    x, entered = torch.randn(2, 5, H), torch.randn(2, 5, 2 * H)
    assert torch.equal(DraftLayer(H, SIZES.filled(H), inputs=2 * H)(x, entered, text_view(2, 5)), x)


def test_a_layer_over_a_text_equals_a_llama_layer_of_the_same_weights():
    config = LlamaConfig(
        hidden_size=H, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        rope_parameters={"rope_theta": 500.0, "rope_type": "default"}, rms_norm_eps=1e-5, attn_implementation="eager",
    )  # fmt: skip
    theirs, ours = LlamaDecoderLayer(config, 0).double(), made()
    missing, surplus = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert missing == ["input_layernorm.weight"] and surplus == []
    torch.nn.init.normal_(theirs.input_layernorm.weight)
    x, positions = torch.randn(2, 7, H, dtype=torch.float64), torch.arange(7)[None]
    mask = torch.full((7, 7), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    angles = LlamaRotaryEmbedding(config)(x, positions)
    expected = theirs(x, attention_mask=mask, position_embeddings=angles)
    torch.testing.assert_close(ours(x, theirs.input_layernorm(x), text_view(2, 7)), expected, rtol=1e-6, atol=1e-6)


@given(st.integers(1, 4), st.floats(2.0, 1e6), st.lists(st.integers(0, 5000), min_size=1, max_size=5))
def test_rotation_turns_each_pair_by_its_position(pairs, theta, places):
    x = torch.randn(2, 3, len(places), 2 * pairs, dtype=torch.float64)
    found = rotated(x, angles_of(torch.tensor([places]).expand(2, -1), 2 * pairs, theta, torch.float64))
    for row, place in enumerate(places):
        for pair in range(pairs):
            angle = torch.tensor(place * theta ** (-pair / pairs), dtype=torch.float64)
            turn = torch.polar(torch.ones_like(angle), angle)
            expected = torch.complex(x[:, :, row, pair], x[:, :, row, pair + pairs]) * turn
            torch.testing.assert_close(found[:, :, row, pair], expected.real)
            torch.testing.assert_close(found[:, :, row, pair + pairs], expected.imag)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 5000))
def test_scores_depend_on_distances_alone(one, two, shift):
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(moved):
        turned = [
            rotated(x, angles_of(torch.tensor([[place + moved]]), 8, 1e4, torch.float64))
            for x, place in ((query, one), (key, two))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(0), score(shift), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_far_positions_are_turned_as_exactly_as_near_ones(dtype):
    """Angles are worked out in float64: in half precision position 2,049 would not exist."""
    cosine, sine = angles_of(torch.tensor([[100_003]]), 8, 1e4, dtype)
    exact = angles_of(torch.tensor([[100_003]]), 8, 1e4, torch.float64)
    torch.testing.assert_close(cosine.double(), exact[0], rtol=0, atol=4e-3)
    torch.testing.assert_close(sine.double(), exact[1], rtol=0, atol=4e-3)
    assert cosine.dtype == sine.dtype == dtype


def test_attention_may_read_wider_rows_than_the_stream():
    layer = made(inputs=2 * H)
    assert layer.self_attn.q_proj.in_features == layer.self_attn.v_proj.in_features == 2 * H
    x, entered = torch.randn(1, 3, H, dtype=torch.float64), torch.randn(1, 3, 2 * H, dtype=torch.float64)
    assert layer(x, entered, text_view(1, 3)).shape == (1, 3, H)


def test_gradients_reach_every_parameter():
    layer, x = made(), torch.randn(1, 4, H, dtype=torch.float64)
    layer(x, x, text_view(1, 4)).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in layer.parameters())


def test_a_head_may_be_wider_than_its_share_of_the_stream():
    attention = DraftAttention(H, H, LayerSizes(num_attention_heads=3, head_dim=16).filled(H))
    assert attention.q_proj.out_features == 48 and attention.o_proj.weight.shape == (H, 48)
