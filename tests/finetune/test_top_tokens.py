"""The likeliest tokens of an LM head."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.finetune import top_tokens
from medusa_spec.finetune.top_tokens import top_log_probs
from medusa_spec.heads import Projection


@given(
    st.integers(0, 9),
    st.integers(1, 23),
    st.integers(1, 30),
    st.integers(1, 60),
    st.booleans(),
    st.sampled_from([1.0, 0.5]),
    st.sampled_from([None, 3.0]),
)
def test_they_are_those_of_all_logits_at_once(
    positions: int, count: int, piece: int, chunk: int, with_bias: bool, scale: float, softcap: float | None
) -> None:
    h, weight, bias = torch.randn(positions, 6), torch.randn(23, 6), torch.randn(23)
    projection = Projection(weight=weight, bias=bias if with_bias else None, scale=scale, softcap=softcap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_tokens, "VOCABULARY_SLICE", piece)
        patch.setattr(top_tokens, "CHUNK_ELEMENTS", chunk)
        ids, logs = top_log_probs(h, projection, count)
    expected = projection(h).log_softmax(1)
    torch.testing.assert_close(logs, expected.sort(1, descending=True).values[:, :count])
    torch.testing.assert_close(logs, expected.gather(1, ids))
    assert all(len(row.unique()) == count for row in ids)


def test_a_bfloat16_model_is_computed_in_float32() -> None:
    h, weight = (20 * torch.randn(4, 8)).bfloat16(), torch.randn(50, 8).bfloat16()
    ids, logs = top_log_probs(h, Projection(weight=weight), 50)
    assert logs.dtype == torch.float32
    expected = (h.double() @ weight.double().T).log_softmax(1).gather(1, ids)
    torch.testing.assert_close(logs.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(logs.exp().sum(1), torch.ones(4))
