"""Joined layers are one product and remain layers of their own."""

import pytest
import torch
from torch import nn

from medusa_spec.native.build import library
from medusa_spec.prepared.joined import JoinedLinear
from medusa_spec.prepared.packed_layer import pack_layer, restore
from medusa_spec.prepared.packed_linear import available, packed_size

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
    sizes = [packed_size(module._modules[name].out_features, 24) for name in NAMES]
    module.memory = torch.empty(sum(sizes), dtype=dtype)
    for name, into in zip(NAMES, module.memory.split(sizes), strict=True):
        pack_layer(module._modules[name], keep_dense=False, into=into)
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


def test_it_serves_packed_layers(owner, joined):
    assert joined.serves(owner)


CHANGES = {
    "restored": lambda owner: restore(owner.b),
    "exchanged": lambda owner: setattr(owner, "b", nn.Linear(24, 32)),
    "wrapped": lambda owner: setattr(owner, "b", nn.Sequential(owner.b)),
    "deleted": lambda owner: delattr(owner, "b"),
    "assigned": lambda owner: setattr(owner.b, "weight", nn.Parameter(torch.zeros(32, 24), requires_grad=False)),
    "hooked": lambda owner: owner.b.register_forward_hook(lambda *_: None),
    "hooked before": lambda owner: owner.b.register_forward_pre_hook(lambda *_: None),
    "forward of its own": lambda owner: setattr(owner.b, "forward", owner.b.forward),
    "cast": lambda owner: owner.b.double(),
    "loaded": lambda owner: owner.load_state_dict(owner.state_dict()),
    "trained": lambda owner: owner.b.requires_grad_(True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_it_serves_nothing_else(owner, joined, change):
    change(owner)
    assert not joined.serves(owner)


def test_what_trains_may_be_served_where_no_gradient_is_asked_for(owner, joined):
    owner.b.requires_grad_(True)
    with torch.no_grad():
        assert joined.serves(owner)
