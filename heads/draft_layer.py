"""A decoder layer of the heads' own: rotary attention over the text and the draft, and a gated MLP. Knows no family."""

from typing import Any

import torch
from torch import nn

from medusa_spec.heads.rotary import rates_of
from medusa_spec.heads.sizes import LayerSizes
from medusa_spec.heads.view import View


class DraftAttention(nn.Module):
    """Rotary attention with shared key heads.

    Args:
        inputs: Width of what it reads.
        hidden_size: H, width of what it returns.
        sizes: Filled.
    """

    def __init__(self, inputs: int, hidden_size: int, sizes: LayerSizes) -> None:
        super().__init__()
        numbers: Any = sizes  # filled: nothing is None
        self.heads, self.kv_heads, self.dim = numbers.num_attention_heads, numbers.num_key_value_heads, numbers.head_dim
        self.theta, self.scaling = numbers.rope_theta, sizes.rope_scaling
        self.q_proj = nn.Linear(inputs, self.heads * self.dim, bias=sizes.qkv_bias)
        self.k_proj = nn.Linear(inputs, self.kv_heads * self.dim, bias=sizes.qkv_bias)
        self.v_proj = nn.Linear(inputs, self.kv_heads * self.dim, bias=sizes.qkv_bias)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden_size, bias=False)

    def forward(self, x: torch.Tensor, view: View) -> torch.Tensor:
        """[B, T, inputs] to [B, T, H]."""
        angles = angles_of(view.positions, self.dim, self.theta, x.dtype, self.scaling)
        query, key, value = (
            projected(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
            for projected in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(view.attend(rotated(query, angles), rotated(key, angles), value))


class DraftMlp(nn.Module):
    """down(SiLU(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] to [..., H]."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """x + o(attention(entered)), and then that plus the MLP of its norm.

    The products that end in the residual stream, o and down, start at zero: a fresh layer is the identity.

    Args:
        hidden_size: H.
        sizes: Filled.
        inputs: Width of what attention reads; None is H.
    """

    def __init__(self, hidden_size: int, sizes: LayerSizes, *, inputs: int | None = None) -> None:
        super().__init__()
        numbers: Any = sizes
        self.self_attn = DraftAttention(inputs or hidden_size, hidden_size, sizes)
        self.mlp = DraftMlp(hidden_size, numbers.intermediate_size)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=numbers.rms_norm_eps)
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def forward(self, x: torch.Tensor, entered: torch.Tensor, view: View) -> torch.Tensor:
        """Residual stream [B, T, H] and what attention reads, [B, T, inputs], to [B, T, H]."""
        x = x + self.self_attn(entered, view)
        return x + self.mlp(self.post_attention_layernorm(x))


def angles_of(
    positions: torch.Tensor, dim: int, theta: float, dtype: torch.dtype, scaling: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [B, T, D] of rotary positions [B, T], as two equal halves."""
    rates = rates_of(dim, theta, scaling, positions.device)
    turns = (positions.double()[..., None] * rates).repeat(1, 1, 2)
    return turns.cos().to(dtype), turns.sin().to(dtype)


def rotated(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Heads [B, heads, T, D] turned by their positions, as halves (i, i + D / 2)."""
    low, high = x.chunk(2, dim=-1)
    cosine, sine = (part.unsqueeze(1) for part in angles)
    return x * cosine + torch.cat([-high, low], dim=-1) * sine
