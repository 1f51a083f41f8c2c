import inspect
from typing import Any, NamedTuple

import pytest
import torch

from medusa_spec import kernels, static_kernels
from medusa_spec.kernels import math_kernel
from medusa_spec.static_kernels import MASKED, available, fits, flash_attn_prefix, varlen_prefix

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
KV_HEADS, GROUPS, NODES, SLOTS, DIM, LENGTH, SCALE = 2, 3, 4, 24, 16, 13, 0.3


def states(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """Folded query, whole buffers; what lies behind the prefix would be seen."""
    query = torch.randn(1, KV_HEADS, GROUPS * NODES, DIM).to(dtype)
    key, value = (torch.randn(1, KV_HEADS, SLOTS, DIM) for _ in range(2))
    key[:, :, LENGTH:] = 30.0
    return query, key.to(dtype), value.to(dtype)


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softcap: float | None = None) -> Any:
    return math_kernel(query, key[:, :, :LENGTH], value[:, :, :LENGTH], None, SCALE, softcap)


def flash_stand_in(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    softcap: float,
    return_softmax_lse: bool,
) -> Any:
    """flash-attn: [B, S, H, D], int32 lengths on the device, nothing behind them is read."""
    assert cache_seqlens.dtype == torch.int32 and cache_seqlens.shape == (1,)
    assert q.shape == (1, GROUPS * NODES, KV_HEADS, DIM) and k_cache.shape == v_cache.shape == (1, SLOTS, KV_HEADS, DIM)
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert return_softmax_lse and not causal
    query, key, value = (t.transpose(1, 2) for t in (q, k_cache, v_cache))
    length = int(cache_seqlens)
    out, lse = math_kernel(query, key[:, :, :length], value[:, :, :length], None, softmax_scale, softcap or None)
    return out.to(q.dtype).transpose(1, 2), lse


class Aux(NamedTuple):
    lse: bool = False


def varlen_stand_in(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Aux,
    scale: float,
    enable_gqa: bool,
    seqused_k: torch.Tensor,
) -> Any:
    """torch's varlen_attn: [T, H, D], KV heads shared by neighbouring query heads, log-sum-exp [Hq, T]."""
    assert query.shape == (NODES, KV_HEADS * GROUPS, DIM) and key.shape == value.shape == (SLOTS, KV_HEADS, DIM)
    assert cu_seq_q.tolist() == [0, max_q] == [0, NODES] and cu_seq_k.tolist() == [0, max_k] == [0, SLOTS]
    assert {t.dtype for t in (cu_seq_q, cu_seq_k, seqused_k)} == {torch.int32} and return_aux.lse and enable_gqa
    length = int(seqused_k)
    keys, values = (t[:length].transpose(0, 1).repeat_interleave(GROUPS, 0)[None] for t in (key, value))
    out, lse = math_kernel(query.transpose(0, 1)[None], keys, values, None, scale, None)
    return out[0].transpose(0, 1).to(query.dtype), lse[0]


def near(found: Any, wanted: Any) -> bool:
    return all(torch.allclose(f.float(), w.float(), rtol=2e-2, atol=2e-2) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_flash_attn_sees_the_prefix_and_nothing_behind_it(softcap, monkeypatch):
    monkeypatch.setattr(kernels, "_flash_attn", lambda: flash_stand_in)
    query, key, value = states()
    length = torch.tensor([LENGTH], dtype=torch.int32)
    found = flash_attn_prefix(query, key, value, length, NODES, SCALE, softcap)
    assert found[0].shape == query.shape and near(found, expected(query, key, value, softcap))


def test_varlen_sees_the_prefix_and_nothing_behind_it(monkeypatch):
    monkeypatch.setattr(static_kernels, "_varlen", lambda: (varlen_stand_in, Aux))
    query, key, value = states()
    length = torch.tensor([LENGTH], dtype=torch.int32)
    found = varlen_prefix(query, key, value, length, NODES, SCALE, None)
    assert found[0].shape == query.shape and near(found, expected(query, key, value))


def test_the_stand_in_takes_what_torch_s_varlen_attn_takes():
    there = static_kernels._varlen()
    if there is None:
        pytest.skip("this torch's varlen_attn cannot stop at a length")
    ours, theirs = inspect.signature(varlen_stand_in).parameters, inspect.signature(there[0]).parameters
    assert {name: p.kind for name, p in ours.items()}.items() <= {name: p.kind for name, p in theirs.items()}.items()
    assert there[1](lse=True).lse


def test_libraries_are_used_where_they_are_the_best_first(monkeypatch):
    assert available(CPU) == [MASKED]
    monkeypatch.setattr(kernels, "_flash_attn", lambda: flash_stand_in)
    monkeypatch.setattr(static_kernels, "_varlen", lambda: (varlen_stand_in, Aux))
    assert available(CUDA) == ["flash-attn", "varlen", MASKED]
    monkeypatch.setattr(kernels, "_flash_attn", lambda: None)
    assert available(CUDA) == ["varlen", MASKED]
    monkeypatch.setattr(static_kernels, "_varlen", lambda: None)
    assert available(CUDA) == [MASKED]


@pytest.mark.parametrize("name", ["flash-attn", "varlen"])
def test_what_the_libraries_do_not_know_does_not_fit(name):
    query, _, value = states()
    assert fits(name, query, value, None)
    assert not fits(name, query.float(), value.float(), None)
    assert not fits(name, query, value[..., :8], None)
    assert not fits(name, query.repeat(1, 1, 1, 17), value.repeat(1, 1, 1, 17), None)  # 272
    assert not fits(name, query[..., :12], value[..., :12], None)
    assert fits(name, query, value, 2.0) is (name == "flash-attn")
