"""The moving average of weights."""

from pathlib import Path

import pytest
import torch
from torch import nn

from medusa_spec.errors import CheckpointError
from medusa_spec.finetune.ema import FILE_NAME, WeightAverage


def module() -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(3, 2)
    made.bias.requires_grad_(False)
    return made


def steps(linear: nn.Linear, average: WeightAverage, numbers: range) -> list[torch.Tensor]:
    weights = []
    for number in numbers:
        with torch.no_grad():
            linear.weight.copy_(torch.full_like(linear.weight, float(number)))
        average.update(number)
        weights.append(linear.weight.detach().clone())
    return weights


def test_it_is_the_recursion_and_early_steps_count_more() -> None:
    linear = module()
    expected = linear.weight.detach().clone()
    average = WeightAverage(linear, 0.5)
    for number, weight in enumerate(steps(linear, average, range(1, 30)), 1):
        decay = min(0.5, (1 + number) / (10 + number))
        expected = decay * expected + (1 - decay) * weight
    average.apply()
    torch.testing.assert_close(linear.weight.detach(), expected)
    assert 27 < expected[0, 0].item() < 29  # a decay of a half lags by two steps


def test_it_holds_for_a_while_and_the_weights_come_back_whatever_happens() -> None:
    linear = module()
    average = WeightAverage(linear, 0.9)
    weights = steps(linear, average, range(1, 4))[-1]
    with pytest.raises(KeyError), average.applied():
        assert not torch.equal(linear.weight, weights)
        raise KeyError
    assert torch.equal(linear.weight, weights)


def test_what_is_frozen_is_left_alone(tmp_path: Path) -> None:
    linear = module()
    average = WeightAverage(linear, 0.9)
    with torch.no_grad():
        linear.bias.fill_(7.0)
    average.apply()
    assert linear.bias.tolist() == [7.0, 7.0]


def test_it_goes_on_from_a_file_with_the_same_bits(tmp_path: Path) -> None:
    whole, first, second = module(), module(), module()
    average = WeightAverage(whole, 0.99)
    steps(whole, average, range(1, 9))
    average.apply()
    begun = WeightAverage(first, 0.99)
    steps(first, begun, range(1, 5))
    begun.save(tmp_path)
    resumed = WeightAverage(second, 0.99)
    resumed.load(tmp_path)
    steps(second, resumed, range(5, 9))
    resumed.apply()
    assert torch.equal(whole.weight, second.weight)


def test_an_average_of_other_parameters_is_refused(tmp_path: Path) -> None:
    WeightAverage(nn.Linear(3, 5), 0.9).save(tmp_path)
    with pytest.raises(CheckpointError, match=f"{FILE_NAME} must average the parameters that are trained"):
        WeightAverage(module(), 0.9).load(tmp_path)
    with pytest.raises(CheckpointError, match=f"none.*{FILE_NAME} cannot be read"):
        WeightAverage(module(), 0.9).load(tmp_path / "none")
