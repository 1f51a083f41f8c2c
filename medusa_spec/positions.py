"""How far a model's positions go, and where they are rescaled, as its config says. Knows no models."""

from typing import Any

RESCALED = {"dynamic", "longrope"}
"""Kinds of rotary positions that are rescaled by the longest position of a pass."""


def rescaled(config: Any) -> bool:
    """Whether rotary positions depend on the longest one of a pass."""
    return any(part.get("rope_type") in RESCALED for part in _ropes(config))


def longest(config: Any) -> int | None:
    """Longest text that learnt positions allow; None where positions are computed."""
    computed = getattr(config, "rope_parameters", None)
    return None if computed else getattr(config, "max_position_embeddings", None)


def deepest(config: Any, length: int) -> int | None:
    """How deep a tree may be behind `length` prefix tokens; None for no bound.

    Learnt positions end with their table. Rotary positions that are rescaled by the longest position of a pass must not
    be rescaled by a draft before the text itself gets there.
    """
    bounds = [] if (table := longest(config)) is None else [max(0, table - 1 - length)]
    for part in _ropes(config):
        if part.get("rope_type") in RESCALED:
            edge = _edge(part, config)
            if length < edge:
                bounds.append(edge - 1 - length)
            elif part["rope_type"] == "dynamic":  # every further token rescales
                bounds.append(0)
    return min(bounds, default=None)


def longrope_edge(config: Any) -> int | None:
    """The length of text at which rotary factors change once, and the cache is of no use any more; None for none."""
    edges = [_edge(part, config) for part in _ropes(config) if part.get("rope_type") == "longrope"]
    return min(edges, default=None)


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The settings of rotary positions, and those of each kind of layer where they differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def _edge(rope: dict[str, Any], config: Any) -> int:
    return int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
