"""Attention kernels that also return the log-sum-exp, by device, and the merging of two parts. Knows no trees."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

Part = tuple[torch.Tensor, torch.Tensor]
"""Output [1, Hkv, Q, Dv] and log-sum-exp of its scores [1, Hkv, Q] (float32, or float64 for float64 inputs)."""

Kernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float, float | None],
    Part,
]
"""(query [1, Hkv, Q, D], key [1, Hkv, S, D], value [1, Hkv, S, Dv], bias [1, 1, Q, S] or None, scale, softcap)."""


def math_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> Part:
    """Plain products in at least float32: any device, soft-cap included. The reference for the others."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(dtype)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.clamp_min(torch.finfo(dtype).min).unsqueeze(-1))
    return weights @ value.to(dtype), lse


def cpu_flash_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> Part:
    """torch's fused CPU kernel. It wants equal K and V head sizes and at least one key, and knows no soft-cap."""
    if softcap is not None:
        return math_kernel(query, key, value, bias, scale, softcap)
    dim, value_dim = query.shape[-1], value.shape[-1]
    if value_dim < dim:
        value = torch.nn.functional.pad(value, (0, dim - value_dim))
    elif value_dim > dim:
        return math_kernel(query, key, value, bias, scale, None)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=bias, scale=scale
    )
    return out[..., :value_dim], lse


FLASH_ATTN_LIMIT = 256
"""Largest head size that flash-attn knows."""


@lru_cache(maxsize=1)
def _flash_attn() -> Any:
    """flash-attn's cache kernel, or None where it is not installed."""
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return None
    return flash_attn_with_kvcache


def flash_attn_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> Part:
    """flash-attn over a prefix that every query sees (no bias), for float16 and bfloat16 on CUDA.

    flash-attn orders [B, S, H, D] and takes int32 lengths; the buffers are passed as views, nothing is copied. It
    wants one head size of at most `FLASH_ATTN_LIMIT` for K and V.
    """
    dim, value_dim = query.shape[-1], value.shape[-1]
    fits = value_dim <= dim <= FLASH_ATTN_LIMIT and query.dtype in (torch.float16, torch.bfloat16)
    if bias is not None or not fits:
        return math_kernel(query, key, value, bias, scale, softcap)
    if value_dim < dim:
        value = torch.nn.functional.pad(value, (0, dim - value_dim))
    lengths = torch.full((query.shape[0],), key.shape[2], dtype=torch.int32, device=query.device)
    out, lse = _flash_attn()(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        cache_seqlens=lengths,
        softmax_scale=scale,
        causal=False,
        softcap=softcap or 0.0,
        return_softmax_lse=True,
    )[:2]
    return out.transpose(1, 2)[..., :value_dim], lse


def prefix_kernel(device: torch.device) -> Kernel:
    """The kernel for the part that every node sees without a mask."""
    if device.type == "cpu":
        return cpu_flash_kernel
    return flash_attn_kernel if device.type == "cuda" and _flash_attn() is not None else math_kernel


def small_kernel(device: torch.device, softcap: float | None) -> Kernel:
    """The kernel for a masked part."""
    return cpu_flash_kernel if device.type == "cpu" and softcap is None else math_kernel


def merge_parts(first: Part, second: Part) -> Part:
    """Attention over two disjoint sets of keys from the attention over each, weighted by their log-sum-exp.

    A part that saw no key has log-sum-exp -inf and weight 0; if neither saw one the result is 0.
    """
    lse = torch.logaddexp(first[1], second[1])
    safe = lse.clamp_min(torch.finfo(lse.dtype).min)  # -inf - -inf would be nan
    out = first[0].to(lse.dtype) * torch.exp(first[1] - safe).unsqueeze(-1)
    return out + second[0].to(lse.dtype) * torch.exp(second[1] - safe).unsqueeze(-1), lse


def sink_rescale(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, groups: int, nodes: int) -> torch.Tensor:
    """Takes a learnt sink into the softmax: one more term of the log-sum-exp, with no value behind it.

    Args:
        out: [1, Hkv, groups * nodes, Dv].
        lse: [1, Hkv, groups * nodes].
        sinks: One logit per query head [Hq = Hkv * groups].
        groups: Query heads per KV head.
        nodes: N.
    """
    sink = sinks.to(lse.dtype).view(1, -1, groups, 1).expand(-1, -1, -1, nodes).reshape(lse.shape)
    return out.to(lse.dtype) * torch.sigmoid(lse - sink).unsqueeze(-1)
