"""Learning rates by part."""

import pytest
import torch
from torch import nn

from medusa_spec.errors import ConfigError
from medusa_spec.finetune.learning_rates import check_parts, factor_of, split_groups

NAMES = ["heads.heads.0.lm_head.weight", "heads.heads.1.blocks.0.linear.weight", "heads.heads.10.blocks.0.linear.bias"]


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ({}, [1.0, 1.0, 1.0]),
        ({"lm_head": 0.1}, [0.1, 1.0, 1.0]),
        ({"heads.1": 2.0}, [1.0, 2.0, 1.0]),
        ({"heads.0": 3.0, "lm_head": 0.5}, [1.5, 1.0, 1.0]),
        ({"bias": 2.0, "blocks": 2.0}, [1.0, 2.0, 4.0]),
    ],
)
def test_factors_of_all_parts_of_a_name_are_multiplied(factors: dict[str, float], expected: list[float]) -> None:
    assert [factor_of(name, factors) for name in NAMES] == pytest.approx(expected)


@pytest.mark.parametrize("part", ["lm_hea", "heads.2", "head", "linear.blocks"])
def test_a_part_that_is_none_is_refused_and_the_parts_are_named(part: str) -> None:
    with pytest.raises(ConfigError, match=f"bias, blocks, heads, linear, lm_head, weight, got '{part}'"):
        check_parts(NAMES, {"lm_head": 0.1, part: 2.0})
    check_parts(NAMES, {"lm_head": 0.1})


def test_groups_are_split_and_a_schedule_scales_them_alike() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    biases = {p for name, p in module.named_parameters() if name.endswith("bias")}
    weights = [p for p in module.parameters() if p not in biases]
    optimizer = torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.3}, {"params": list(biases), "weight_decay": 0.0}], lr=1.0
    )
    optimizer.param_groups[:] = split_groups(optimizer.param_groups, module, {"0": 0.5, "2.weight": 0.25})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer.step()
    schedule.step()
    rates = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.0 if parameter in biases else 0.3) and parameter not in rates
            rates[parameter] = group["lr"]
    expected = {"0.weight": 0.25, "0.bias": 0.25, "1.weight": 0.5, "1.bias": 0.5, "2.weight": 0.125, "2.bias": 0.5}
    assert {name: rates[p] for name, p in module.named_parameters()} == expected
    assert optimizer.param_groups[0]["lr"] == 0.5  # what is logged is the rate itself
