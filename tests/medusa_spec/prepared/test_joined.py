"""Joined layers are one product and remain layers of their own."""

import pytest
import torch
from torch import nn

from medusa_spec.native.build import library
from medusa_spec.prepared.joined import JoinedLinear, pack_together
from medusa_spec.prepared.packed_linear import available

pytestmark = pytest.mark.skipif(not available(), reason=f"no kernel on this machine: {library().reason}")
NAMES = ("a", "b", "c")


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=[(True, True, True), (False, False, False), (True, False, True)], ids=str)
def owner(request, dtype):
    """Three layers of one input, with or without biases, packed side by side."""
    module = nn.Module()
    for name, outputs, bias in zip(NAMES, (64, 32, 17), request.param, strict=True):
        setattr(module, name, nn.Linear(24, outputs, bias=bias))
    module = module.to(dtype).requires_grad_(False)
    module.memory = pack_together([module._modules[name] for name in NAMES])
    return module


@pytest.fixture
def joined(owner):
    return JoinedLinear(owner, NAMES, owner.memory)


def test_it_gives_the_bits_of_the_layers(owner, joined, dtype):
    x = torch.randn(2, 5, 24).to(dtype)
    assert joined.outputs == [64, 32, 17]
    assert torch.equal(joined(x), torch.cat([getattr(owner, name)(x) for name in NAMES], dim=-1))


def test_biases_are_those_of_now(owner, joined, dtype):
    x = torch.randn(5, 24).to(dtype)
    for name in NAMES:
        if getattr(owner, name).bias is not None:
            getattr(owner, name).bias.data.add_(3)
    assert torch.equal(joined(x), torch.cat([getattr(owner, name)(x) for name in NAMES], dim=-1))
