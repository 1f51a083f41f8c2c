"""The weight of what stands in the place of a linear layer."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from medusa_spec.heads.weight import weight_of


def test_a_plain_layer_gives_its_own_parameter() -> None:
    layer = nn.Linear(3, 5)
    assert weight_of(layer) is layer.weight


@pytest.mark.parametrize("bias", [False, True])
def test_an_adapters_share_is_in_the_weight_and_in_the_gradient(bias: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 5, bias=bias)).double()
    get_peft_model(model, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False), autocast_adapter_dtype=False)
    x, layer = torch.randn(4, 3, dtype=torch.float64), model[0]
    weight = weight_of(layer)
    torch.testing.assert_close(nn.functional.linear(x, weight, layer.bias), layer(x))
    direct = torch.autograd.grad(layer(x).square().sum(), layer.lora_A["default"].weight)
    through = torch.autograd.grad(
        nn.functional.linear(x, weight, layer.bias).square().sum(), layer.lora_A["default"].weight
    )
    torch.testing.assert_close(through, direct)
