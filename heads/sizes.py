"""Sizes of a decoder layer, the target's or a head's own. Knows numbers, no modules."""

from dataclasses import dataclass, fields
from typing import Any

from medusa_spec.heads.rotary import parse_scaling


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """What a decoder layer of a head is made of; None follows the target, or without one H.

    Attributes:
        num_attention_heads: Query heads; for H alone one for every 64 entries.
        num_key_value_heads: Key heads; as many as query heads.
        head_dim: Width of a head; H divided by the query heads.
        intermediate_size: Width of the gated MLP; 8/3 of H.
        rope_theta: Base of the rotary positions.
        rms_norm_eps: Added to the mean square in norms.
        rope_scaling: How positions are stretched, see `parse_scaling`; empty where they are not.
        qkv_bias: Whether queries, keys and values have biases.
    """

    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    rope_theta: float | None = None
    rms_norm_eps: float | None = None
    rope_scaling: str = ""
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        for field in fields(LayerSizes):
            value = getattr(self, field.name)
            if field.default is None and value is not None and not value > 0:
                raise ValueError(f"{field.name} must be above 0, or None, got {value!r}")
        if self.rope_scaling:
            parse_scaling(self.rope_scaling)
        heads, keys = self.num_attention_heads, self.num_key_value_heads
        if heads is not None and keys is not None and heads % keys:
            raise ValueError(f"num_attention_heads must be a multiple of num_key_value_heads {keys}, got {heads}")
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"head_dim must be even, since positions rotate pairs, got {self.head_dim}")

    def filled(self, hidden_size: int) -> "LayerSizes":
        """The same with every None replaced.

        Raises:
            ValueError: If query heads do not share the key heads evenly.
        """
        heads = self.num_attention_heads or max(1, hidden_size // 64)
        dim = self.head_dim or max(2, hidden_size // heads // 2 * 2)
        return LayerSizes(
            num_attention_heads=heads,
            num_key_value_heads=self.num_key_value_heads or heads,
            head_dim=dim,
            intermediate_size=self.intermediate_size or -(-hidden_size * 8 // 3 // 32) * 32,
            rope_theta=self.rope_theta or 10_000.0,
            rms_norm_eps=self.rms_norm_eps or 1e-5,
            rope_scaling=self.rope_scaling,
            qkv_bias=self.qkv_bias,
        )


@dataclass(frozen=True, kw_only=True)
class TapOptions(LayerSizes):
    """Of families that also read layers of the target.

    Attributes:
        taps: Layers of the target whose inputs are read, from 0, as `"2,15,27"`: a low, a middle and a high one; or the
            number of a single one.
    """

    taps: str | int = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "taps", str(self.taps))
        try:
            layers = self.layers
        except ValueError as error:
            raise ValueError(f"taps must be numbers of layers with commas between, got {self.taps!r}") from error
        if list(layers) != sorted({layer for layer in layers if layer >= 0}):
            raise ValueError(f"taps must be numbers of layers from 0 that rise, got {self.taps!r}")

    @property
    def layers(self) -> tuple[int, ...]:
        """The tapped layers as numbers."""
        return tuple(int(part) for part in str(self.taps).split(",")) if self.taps else ()


def usual_taps(layers: int) -> str:
    """The taps of published EAGLE-3 heads: the inputs of layers 2, L / 2 and L - 3, as far as there are so many."""
    wanted = sorted({min(2, layers - 1), layers // 2, max(layers - 3, 0)})
    return ",".join(map(str, wanted))


def sizes_of(config: Any) -> dict[str, Any]:
    """What the config of a target's decoder says of these sizes, by name; what it does not say is left out."""
    found: dict[str, Any] = {}
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"):
        value = getattr(config, name, None)
        if type(value) is int and value > 0:
            found[name] = value
    rope = getattr(config, "rope_parameters", None) or {}
    for name, value in (
        ("rope_theta", rope.get("rope_theta")),
        ("rms_norm_eps", getattr(config, "rms_norm_eps", None)),
    ):
        if isinstance(value, (int, float)) and value > 0:
            found[name] = float(value)
    heads, keys = found.get("num_attention_heads"), found.get("num_key_value_heads")
    if heads is not None and keys is not None and heads % keys:
        del found["num_key_value_heads"]
    if found.get("head_dim", 0) % 2:  # of learnt positions; those of a head rotate pairs
        del found["head_dim"]
    return found
