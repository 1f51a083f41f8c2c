import math
from typing import Any

import pytest
import torch

from medusa_spec import kernels
from medusa_spec.kernels import (
    Kernel,
    Part,
    cpu_flash_kernel,
    flash_attn_kernel,
    math_kernel,
    merge_parts,
    prefix_kernel,
    sink_rescale,
    small_kernel,
)

CPU = torch.device("cpu")
HEADS, QUERIES, KEYS, DIM = 2, 6, 11, 16
SCALE = 0.3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def states(dtype: torch.dtype, *, value_dim: int = DIM, keys: int = KEYS) -> tuple[torch.Tensor, ...]:
    """Random query, key and value."""
    return (
        torch.randn(1, HEADS, QUERIES, DIM).to(dtype),
        torch.randn(1, HEADS, keys, DIM).to(dtype),
        torch.randn(1, HEADS, keys, value_dim).to(dtype),
    )


def random_bias(dtype: torch.dtype) -> torch.Tensor:
    """A mask that leaves each query some key."""
    seen = torch.rand(QUERIES, KEYS) < 0.5
    seen[:, 3] = True
    return torch.zeros(QUERIES, KEYS, dtype=dtype).masked_fill(~seen, -math.inf)[None, None]


def by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    softcap: float | None = None,
) -> Part:
    """softmax(q k) v in float64, with its log-sum-exp."""
    scores = query.double() @ key.double().mT * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.double()
    return torch.softmax(scores, -1) @ value.double(), scores.logsumexp(-1)


def assert_near(found: Part, expected: Part, dtype: torch.dtype) -> None:
    limit = TOLERANCE[dtype]
    assert torch.allclose(found[0].double(), expected[0], rtol=limit, atol=limit)
    assert torch.allclose(found[1].double(), expected[1], rtol=limit, atol=limit)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("masked", [False, True], ids=["open", "masked"])
@pytest.mark.parametrize("value_dim", [DIM, DIM - 8, DIM + 8], ids=["equal", "narrower", "wider"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", [math_kernel, cpu_flash_kernel], ids=lambda kernel: kernel.__name__)
def test_each_kernel_is_softmax_attention_with_its_log_sum_exp(
    kernel: Kernel, dtype: torch.dtype, value_dim: int, masked: bool, softcap: float | None
) -> None:
    query, key, value = states(dtype, value_dim=value_dim)
    bias = random_bias(dtype) if masked else None
    found = kernel(query, key, value, bias, SCALE, softcap)
    assert found[0].shape == (1, HEADS, QUERIES, value_dim)
    assert found[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_near(found, by_hand(query, key, value, bias, softcap), dtype)


def test_a_query_that_sees_no_key_has_output_zero_and_weight_zero() -> None:
    query, key, value = states(torch.float32)
    bias = torch.zeros(1, 1, QUERIES, KEYS)
    bias[..., 2, :] = -math.inf
    out, lse = math_kernel(query, key, value, bias, SCALE, None)
    assert not out[:, :, 2].any() and (lse[:, :, 2] == -math.inf).all()
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cut", [1, 5, KEYS - 1])
@pytest.mark.parametrize("kernel", [math_kernel, cpu_flash_kernel], ids=lambda kernel: kernel.__name__)
def test_the_parts_of_a_split_merge_to_the_whole(kernel: Kernel, cut: int, dtype: torch.dtype) -> None:
    query, key, value = states(dtype)
    parts = [
        kernel(query, key[:, :, keys], value[:, :, keys], None, SCALE, None)
        for keys in (slice(None, cut), slice(cut, None))
    ]
    assert_near(merge_parts(*parts), by_hand(query, key, value, None), dtype)


def test_a_part_without_keys_weighs_nothing() -> None:
    full = math_kernel(*states(torch.float32), None, SCALE, None)
    empty = torch.zeros_like(full[0]), torch.full_like(full[1], -math.inf)
    for merged in (merge_parts(full, empty), merge_parts(empty, full)):
        assert torch.equal(merged[0], full[0]) and torch.equal(merged[1], full[1])
    neither = merge_parts(empty, empty)
    assert not neither[0].any() and (neither[1] == -math.inf).all()


def test_scores_far_from_zero_merge_without_overflow() -> None:
    out = torch.ones(1, 1, 1, 2), torch.full((1, 1, 1, 2), 3.0)
    lse = torch.full((1, 1, 1), 1e4), torch.full((1, 1, 1), -1e4)
    merged = merge_parts((out[0], lse[0]), (out[1], lse[1]))
    assert torch.equal(merged[0], out[0]) and torch.equal(merged[1], lse[0])


def test_a_sink_is_one_more_score_without_a_value() -> None:
    groups, nodes = 3, 2  # six folded queries per KV head
    query, key, value = (t.double() for t in states(torch.float64))
    sinks = torch.randn(HEADS * groups, dtype=torch.float64)
    out, lse = math_kernel(query, key, value, None, SCALE, None)
    found = sink_rescale(out, lse, sinks, groups, nodes)
    scores = (query @ key.mT * SCALE).view(HEADS * groups, nodes, KEYS)
    column = sinks.view(-1, 1, 1).expand(-1, nodes, 1)
    weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    expected = weights.view(1, HEADS, QUERIES, KEYS) @ value
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


def stand_in(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """flash-attn's signature and demands: [B, S, H, D], half precision, int32 lengths, one head size."""
    assert q.dtype == k_cache.dtype == v_cache.dtype and q.dtype in (torch.float16, torch.bfloat16)
    assert q.shape == (1, QUERIES, HEADS, DIM) and k_cache.shape == v_cache.shape == (1, KEYS, HEADS, DIM)
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert isinstance(cache_seqlens, torch.Tensor) and cache_seqlens.dtype == torch.int32
    assert cache_seqlens.tolist() == [KEYS]
    assert k is None and v is None and not causal and window_size == (-1, -1) and return_softmax_lse
    assert softmax_scale is not None and isinstance(softcap, float)
    query, key, value = (t.transpose(1, 2) for t in (q, k_cache, v_cache))
    out, lse = math_kernel(query, key, value, None, softmax_scale, softcap or None)
    return out.to(q.dtype).transpose(1, 2), lse


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_flash_attn", lambda: stand_in)


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("value_dim", [DIM, DIM - 8], ids=["equal", "narrower"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_flash_attn_is_called_as_it_wants_to_be(dtype: torch.dtype, value_dim: int, softcap: float | None) -> None:
    query, key, value = states(dtype, value_dim=value_dim)
    found = flash_attn_kernel(query, key, value, None, SCALE, softcap)
    assert found[0].shape == (1, HEADS, QUERIES, value_dim)
    assert_near(found, by_hand(query, key, value, None, softcap), dtype)


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("flash-attn knows none of this")


@pytest.mark.parametrize("case", ["masked", "float32", "wider values", "large heads"])
def test_what_flash_attn_does_not_know_goes_elsewhere(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_flash_attn", lambda: refuse)
    dtype = torch.float32 if case == "float32" else torch.bfloat16
    query, key, value = states(dtype, value_dim=DIM + 8 if case == "wider values" else DIM)
    if case == "large heads":
        query, key = (t.repeat(1, 1, 1, 17) for t in (query, key))  # 272
    bias = random_bias(dtype) if case == "masked" else None
    assert_near(flash_attn_kernel(query, key, value, bias, SCALE, None), by_hand(query, key, value, bias), dtype)


def test_each_device_has_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert prefix_kernel(CPU) is cpu_flash_kernel
    assert small_kernel(CPU, None) is cpu_flash_kernel
    assert small_kernel(CPU, 3.0) is small_kernel(cuda, None) is math_kernel
    monkeypatch.setattr(kernels, "_flash_attn", lambda: None)
    assert prefix_kernel(cuda) is math_kernel
    monkeypatch.setattr(kernels, "_flash_attn", lambda: stand_in)
    assert prefix_kernel(cuda) is flash_attn_kernel
    assert prefix_kernel(torch.device("mps")) is math_kernel
