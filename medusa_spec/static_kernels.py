"""Attention over a prefix whose length the device alone knows, by library. Knows tensors and kernels, no trees."""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from medusa_spec import kernels
from medusa_spec.kernels import Part

HALF = (torch.float16, torch.bfloat16)

PrefixKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float, float | None], Part]
"""(folded query [1, Hkv, G * N, D], key [1, Hkv, S, D], value, length int32 [1], N, scale, softcap)."""


def flash_attn_prefix(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    length: torch.Tensor,
    nodes: int,
    scale: float,
    softcap: float | None,
) -> Part:
    """flash-attn over the first `length` keys; it splits them over the device's processors by itself."""
    out, lse = kernels._flash_attn()(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        cache_seqlens=length,
        softmax_scale=scale,
        causal=False,
        softcap=softcap or 0.0,
        return_softmax_lse=True,
    )[:2]
    return out.transpose(1, 2), lse


@lru_cache(maxsize=1)
def _varlen() -> Any:
    """torch's (varlen_attn, AuxRequest), or None where it cannot stop at a length or return the log-sum-exp."""
    try:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn
    except ImportError:
        return None
    wanted = {"seqused_k", "return_aux", "scale", "enable_gqa"}
    return (varlen_attn, AuxRequest) if wanted <= set(inspect.signature(varlen_attn).parameters) else None


def varlen_prefix(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    length: torch.Tensor,
    nodes: int,
    scale: float,
    softcap: float | None,
) -> Part:
    """torch's flash attention over the first `length` keys.

    It takes [tokens, heads, D] and shares KV heads itself: unfolded, the query has more heads to spread over the
    device, and never so many rows that another library with another log-sum-exp is called.
    """
    varlen_attn, aux = _varlen()
    _, kv_heads, rows, dim = query.shape
    groups, slots = rows // nodes, key.shape[2]
    unfolded = query.view(kv_heads, groups, nodes, dim).permute(2, 0, 1, 3).reshape(nodes, kv_heads * groups, dim)
    queries, keys = (
        torch.arange(0, count + 1, count, dtype=torch.int32, device=query.device) for count in (nodes, slots)
    )
    out, lse = varlen_attn(
        unfolded,
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        queries,
        keys,
        nodes,
        slots,
        return_aux=aux(lse=True),
        scale=scale,
        enable_gqa=True,
        seqused_k=length,
    )
    folded = out.view(nodes, kv_heads, groups, -1).permute(1, 2, 0, 3).reshape(1, kv_heads, rows, -1)
    return folded, lse.reshape(1, kv_heads, rows)


PREFIX_KERNELS: dict[str, PrefixKernel] = {"flash-attn": flash_attn_prefix, "varlen": varlen_prefix}
"""Kernels for a part without a mask, the best first."""

MASKED = "masked"
"""The name of having none: one masked kernel over all slots."""


def available(device: torch.device) -> list[str]:
    """Names of what runs on a device, the best first; `MASKED` runs everywhere."""
    there: dict[str, Callable[[], Any]] = {"flash-attn": lambda: kernels._flash_attn(), "varlen": _varlen}
    return [name for name in PREFIX_KERNELS if device.type == "cuda" and there[name]() is not None] + [MASKED]


def fits(name: str, query: torch.Tensor, value: torch.Tensor, softcap: float | None) -> bool:
    """Whether a prefix kernel takes these states: half precision, one head size, a soft-cap where it knows them."""
    dim = query.shape[-1]
    if query.dtype not in HALF or value.shape[-1] != dim or dim > kernels.FLASH_ATTN_LIMIT or dim % 8:
        return False
    return softcap is None or name == "flash-attn"
