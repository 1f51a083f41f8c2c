"""Settings that one family alone has: a frozen dataclass beside it. Knows no family."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Of families without settings of their own."""


@dataclass(frozen=True, kw_only=True)
class StateOptions:
    """Of families that hand a state on from head to head.

    Attributes:
        inner_size: Width of what is computed in between; None is H.
        tied: One set of weights for all heads; otherwise one for each.
    """

    inner_size: int | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        if self.inner_size is not None and self.inner_size < 1:
            raise ValueError(f"inner_size must be an integer of 1 or more, or None, got {self.inner_size}")


def read_options(options: type[Any], values: Mapping[str, Any], kind: str) -> Any:
    """The options of a family from plain values.

    Args:
        options: Dataclass of the family, every field with a default.
        values: By name; what is left out keeps its default, and an integer may stand for a float.
        kind: Name of the family, for errors.

    Raises:
        ValueError: If a name is unknown or a value of the wrong type, naming it.
    """
    hints, found = get_type_hints(options), dict(values)
    for name, value in values.items():
        if name not in hints:
            raise ValueError(f"options of {kind} heads must be among {sorted(hints)}, got {name!r}")
        allowed = get_args(hints[name]) or (hints[name],)
        if type(value) is int and float in allowed:
            found[name] = float(value)
        elif type(value) not in allowed:
            names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
            raise ValueError(f"{name} of {kind} heads must be {names}, got {value!r}")
    return options(**found)


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Options as they are written on a command line: `["tied=true", "inner_size=256"]` to a dict.

    Raises:
        ValueError: If one has no `=`.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"options must be written name=value, got {text!r}")
        words = {"true": True, "false": False, "none": None}
        try:
            found[name.strip()] = words[value.lower()] if value.lower() in words else json.loads(value)
        except ValueError:
            found[name.strip()] = value
    return found
