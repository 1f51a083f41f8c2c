"""What rows see is what the drawings say, and attention is a weighted mean of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.heads import attention
from medusa_spec.heads.view import UnrolledView

DIM = 4


def naive(query, key, value, mask):
    """Attention of one row of the batch, one query of one head at a time."""
    groups, (heads, rows, dim) = query.shape[0] // key.shape[0], query.shape
    out = torch.zeros(rows, heads, dim, dtype=query.dtype)
    for head in range(heads):
        for row in range(rows):
            seen = mask[row].nonzero().flatten().tolist()
            scores = torch.stack([query[head, row] @ key[head // groups, slot] / dim**0.5 for slot in seen])
            for weight, slot in zip(scores.softmax(0), seen, strict=True):
                out[row, head] += weight * value[head // groups, slot]
    return out.reshape(rows, heads * dim)


def random_pass(batch, heads, kv_heads, rows, generator):
    def draw(count):
        return torch.randn(batch, count, rows, DIM, dtype=torch.float64, generator=generator)

    return draw(heads), draw(kv_heads), draw(kv_heads)


@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 5), st.integers(0, 99)
)
def test_attention_is_a_mean_of_what_is_seen_with_shared_key_heads(batch, kv_heads, groups, rows, before, seed):
    generator = torch.Generator().manual_seed(seed)
    query, _, _ = random_pass(batch, kv_heads * groups, kv_heads, rows, generator)
    _, key, value = random_pass(batch, kv_heads, kv_heads, before + rows, generator)
    mask = torch.rand(rows, before + rows, generator=generator) < 0.5
    mask[:, before:] |= torch.eye(rows, dtype=torch.bool)
    expected = torch.stack([naive(query[b], key[b], value[b], mask) for b in range(batch)])
    torch.testing.assert_close(attention(query, key, value, mask), expected)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("length", [1, 2, 6])
def test_rows_see_the_text_before_them_and_their_own_draft(own, length):
    view = UnrolledView(2, length, torch.device("cpu"), own=own)
    for step in range(4):
        view.next()
        seen = view.seen()
        assert view.positions.tolist() == [[row + step for row in range(length)]] * 2
        for row in range(length):
            if own:  # the keys of this pass alone: of rows whose tokens are all known, and its own
                slots = {j for j in range(length) if j + step <= row} | {row}
            else:
                slots = set(range(row + 1)) | {earlier * length + row for earlier in range(1, step + 1)}
            assert set(seen[row].nonzero().flatten().tolist()) == slots


@given(
    st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
def test_unrolled_attention_is_attention_under_its_mask(batch, kv_heads, groups, rows, steps, own, seed):
    generator = torch.Generator().manual_seed(seed)
    view, keys, values = UnrolledView(batch, rows, torch.device("cpu"), own=own), [], []
    for _ in range(steps):
        query, key, value = random_pass(batch, kv_heads * groups, kv_heads, rows, generator)
        keys, values = ([key], [value]) if own else ([*keys, key], [*values, value])
        out, mask = view.next().attend(query, key, value), view.seen()
        whole = [torch.cat(parts, dim=2) for parts in (keys, values)]
        expected = torch.stack([naive(query[b], whole[0][b], whole[1][b], mask) for b in range(batch)])
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("own", [False, True])
def test_a_layer_that_asks_for_all_keys_gets_those_that_the_mask_speaks_of(own):
    view, given_keys = UnrolledView(1, 3, torch.device("cpu"), own=own), []
    for step in range(3):
        key, value = torch.randn(1, 2, 3, DIM), torch.randn(1, 2, 3, DIM)
        given_keys.append((key, value))
        keys, values = view.next().update(key, value, 0, {})
        shown = given_keys[-1:] if own else given_keys
        assert torch.equal(keys, torch.cat([pair[0] for pair in shown], dim=2))
        assert torch.equal(values, torch.cat([pair[1] for pair in shown], dim=2))
        assert view.seen().shape == (3, keys.shape[2]) and view.step == step
