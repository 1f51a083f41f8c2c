"""How fast rotary positions turn, plain or stretched to texts longer than those of training. Knows numbers alone."""

import math
from collections.abc import Callable

import torch


def rates_of(dim: int, theta: float, scaling: str = "", device: torch.device | None = None) -> torch.Tensor:
    """Angles per position of the pairs of a head, float64 [D / 2].

    Args:
        dim: D.
        theta: Base of the positions.
        scaling: As `parse_scaling` takes it.
        device: Of the result.
    """
    rates = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    if not scaling:
        return rates
    kind, numbers = parse_scaling(scaling)
    return STRETCHES[kind](rates, *numbers)


def parse_scaling(text: str) -> tuple[str, tuple[float, ...]]:
    """`"linear:4"` or `"llama3:8,1,4,8192"` as kind and numbers, which are those of a Llama config.

    ```
    linear   factor
    llama3   factor, low_freq_factor, high_freq_factor, original_max_position_embeddings
    ```

    Raises:
        ValueError: If the kind is unknown, or its numbers are not as many or not above 0.
    """
    kind, _, written = text.partition(":")
    try:
        numbers = tuple(float(number) for number in written.split(","))
    except ValueError:
        numbers = ()
    counts = {"linear": 1, "llama3": 4}
    if len(numbers) != counts.get(kind) or not all(number > 0 for number in numbers):
        raise ValueError(
            "rope_scaling must be 'linear:factor' or 'llama3:factor,low_freq_factor,high_freq_factor,"
            f"original_max_position_embeddings' with numbers above 0, or empty, got {text!r}"
        )
    if kind == "llama3" and not numbers[1] < numbers[2]:
        raise ValueError(f"rope_scaling must have low_freq_factor below high_freq_factor, got {text!r}")
    return kind, numbers


def _linear(rates: torch.Tensor, factor: float) -> torch.Tensor:
    return rates / factor


def _llama3(rates: torch.Tensor, factor: float, low: float, high: float, trained: float) -> torch.Tensor:
    """Slow turns are slowed down, fast ones are kept, those in between are mixed by turns per text of training."""
    turns = trained * rates / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * rates + (1 - kept) * rates / factor


STRETCHES: dict[str, Callable[..., torch.Tensor]] = {"linear": _linear, "llama3": _llama3}
