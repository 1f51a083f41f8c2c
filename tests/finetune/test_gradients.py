"""How large each head's gradient is."""

import pytest
import torch
from torch import nn

from medusa_spec.finetune.gradients import gradient_norms, set_of


class Two(nn.Module):
    """Two heads with a weight and a bias each."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(2, 1) for _ in range(2))


def test_each_head_has_the_norm_of_all_its_gradients() -> None:
    model = Two()
    weight, bias = model.heads[1].weight, model.heads[1].bias
    weight.grad, bias.grad = torch.tensor([[2.0, 4.0]]), torch.tensor([4.0])
    assert gradient_norms(model) == {0: 0.0, 1: pytest.approx(6.0)}


def test_frozen_parameters_have_no_part_in_it() -> None:
    model = Two()
    model.heads[0].requires_grad_(False)
    assert gradient_norms(model) == {1: 0.0}


def test_a_number_that_is_none_stays_one() -> None:
    model = Two()
    model.heads[0].bias.grad = torch.tensor([float("nan")])
    assert gradient_norms(model)[0] != gradient_norms(model)[0]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("heads.heads.3.blocks.0.weight", 3),
        ("module.heads.heads.12.lora_A.default.weight", 12),
        ("heads.0.up.weight", 0),
        ("join.weight", 0),
    ],
)
def test_a_parameter_belongs_to_the_head_in_its_name(name: str, number: int) -> None:
    assert set_of(name) == number
