"""Learning rates by part of the heads. Knows parameters' names and groups of an optimizer, no training loop."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from medusa_spec.errors import ConfigError


def factor_of(name: str, factors: Mapping[str, float]) -> float:
    """The product of the factors of all parts that the name holds, whole components of it.

    ```
    factors lm_head 0.1, heads.1 2      heads.0.lm_head.weight -> 0.1         heads.1.lm_head.weight -> 0.2
                                        heads.0.blocks.0.linear.weight -> 1   heads.10.blocks.0.linear.weight -> 1
    ```
    """
    return math.prod(factors[part] for part in sorted(factors) if _holds(name, part))


def _holds(name: str, part: str) -> bool:
    return f".{part}." in f".{name}."


def check_parts(names: Iterable[str], factors: Mapping[str, float]) -> None:
    """Every part must be that of a trained parameter.

    Raises:
        ConfigError: If one is not, naming the parts that there are.
    """
    names = list(names)
    for part in factors:
        if not any(_holds(name, part) for name in names):
            parts = sorted({piece for name in names for piece in name.split(".") if not piece.isdigit()})
            raise ConfigError(
                f"learning_rates must name parts of the heads' parameters, which are {', '.join(parts)}, got {part!r}"
            )


def split_groups(groups: list[dict[str, Any]], module: nn.Module, factors: Mapping[str, float]) -> list[dict[str, Any]]:
    """Groups of an optimizer, each split by factor on its learning rate; a schedule then scales them all alike.

    Args:
        groups: Its `param_groups`.
        module: Names their parameters.
        factors: By part of a name; see `factor_of`.

    Returns:
        The new groups, those of factor 1 first; parameters keep their order.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    split = []
    for group in groups:
        by_factor: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_factor.setdefault(factor_of(names[parameter], factors), []).append(parameter)
        split += [(factor, group | {"params": some, "lr": group["lr"] * factor}) for factor, some in by_factor.items()]
    return [group for _, group in sorted(split, key=lambda pair: pair[0] != 1.0)]
