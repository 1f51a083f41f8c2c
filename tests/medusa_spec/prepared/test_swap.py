"""A swapped module is what it was but for its forward, and is given back."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

from medusa_spec.prepared.swap import RECORD, Swapped, sample, swap, swap_back, swappable, within_rounding


class Doubled(Swapped):
    """Twice the plain forward, and the record's number on top."""

    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs) + self.__dict__[RECORD]


@pytest.fixture
def module():
    return nn.LayerNorm(4)


def test_the_forward_is_the_fast_one_and_the_class_looks_the_same(module):
    x = torch.randn(2, 4)
    before = module(x)
    swap(module, Doubled, 3.0)
    assert torch.equal(module(x), 2 * before + 3.0)
    assert isinstance(module, nn.LayerNorm)
    assert type(module).__name__ == "LayerNorm" and type(module).__module__ == nn.LayerNorm.__module__
    assert repr(module) == repr(nn.LayerNorm(4))
    assert list(module.state_dict()) == ["weight", "bias"]


def test_modules_of_one_class_share_one_mixed_class(module):
    other = nn.LayerNorm(4)
    swap(module, Doubled, 1.0)
    swap(other, Doubled, 2.0)
    assert type(module) is type(other)
    x = torch.randn(2, 4)
    assert torch.equal(module(x) + 1.0, other(x))


def test_swapping_back_leaves_nothing_and_twice_does_nothing(module):
    attributes = set(vars(module))
    swap(module, Doubled, 1.0)
    swap_back(module)
    swap_back(module)
    assert type(module) is nn.LayerNorm
    assert set(vars(module)) == attributes


def test_what_was_not_swapped_is_left_alone(module):
    swap_back(module)
    assert type(module) is nn.LayerNorm


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))],
    ids=["copy", "deep", "pickle"],
)
def test_copies_and_pickles_are_of_the_plain_class(module, duplicate):
    swap(module, Doubled, lambda: "a record that cannot be pickled")
    other = duplicate(module)
    assert type(other) is nn.LayerNorm and RECORD not in vars(other)
    assert isinstance(module, Doubled) and RECORD in vars(module)
    assert torch.equal(other.weight, module.weight)


def test_a_parametrized_module_keeps_its_weight_when_the_rest_is_given_back(module):
    x = torch.randn(2, 4)
    swap(module, Doubled, 3.0)
    register_parametrization(module, "weight", nn.Hardtanh())
    before = module(x)
    swap_back(module)
    assert torch.equal(module(x), before)
    remove_parametrizations(module, "weight")
    swap_back(module)
    assert type(module) is nn.LayerNorm


def test_a_forward_of_the_instance_is_not_replaced(module):
    assert swappable(module)
    module.forward = module.forward
    assert not swappable(module)


def test_a_swapped_module_is_not_swapped_again(module):
    swap(module, Doubled, 1.0)
    assert not swappable(module)


def test_samples_are_the_same_every_time_and_leave_the_random_state_alone():
    state = torch.get_rng_state()
    assert torch.equal(sample(3, 4, dtype=torch.bfloat16), sample(3, 4, dtype=torch.bfloat16))
    assert not torch.equal(sample(3, dtype=torch.float32), sample(3, dtype=torch.float32, seed=1))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rounding_is_the_last_bit_and_no_more(dtype):
    x = sample(200, dtype=dtype)
    unit = torch.finfo(dtype).eps
    assert within_rounding(x, x)
    assert within_rounding((x.double() * (1 + unit)).to(dtype), x)
    assert not within_rounding((x.double() * (1 + 6 * unit)).to(dtype), x)
    assert not within_rounding(x[1:], x)
    assert not within_rounding(x, torch.full_like(x, torch.inf))
    assert not within_rounding(torch.full_like(x, torch.nan), x)
