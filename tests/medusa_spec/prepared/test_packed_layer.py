"""A packed layer behaves as the nn.Linear that it was, and is loud where it cannot."""

import copy
import pickle

import pytest
import torch
from torch import nn

from medusa_spec.native.build import library
from medusa_spec.prepared.packed_layer import FrozenPackedLinear, KeptDenseLinear, pack_layer, restore
from medusa_spec.prepared.packed_linear import available

pytestmark = pytest.mark.skipif(not available(), reason=f"no kernel on this machine: {library().reason}")


@pytest.fixture(params=[False, True], ids=["dense gone", "dense kept"])
def layer(request):
    """A packed layer, and its plain copy."""
    plain = nn.Linear(24, 40).bfloat16().requires_grad_(False)
    packed = copy.deepcopy(plain)
    pack_layer(packed, keep_dense=request.param)
    assert isinstance(packed, KeptDenseLinear if request.param else FrozenPackedLinear)
    return packed, plain


@pytest.fixture
def x():
    return torch.randn(3, 24).bfloat16()


def test_it_gives_what_the_plain_layer_gives_up_to_rounding(layer, x):
    packed, plain = layer
    torch.testing.assert_close(packed(x), plain(x), rtol=2e-2, atol=2e-2)


def test_it_answers_for_shape_dtype_and_device(layer):
    packed, plain = layer
    assert isinstance(packed, nn.Linear)
    for name in ("shape", "dtype", "device"):
        assert getattr(packed.weight, name) == getattr(plain.weight, name)
    assert (packed.in_features, packed.out_features) == (24, 40)


def test_restore_gives_the_weight_back_bit_for_bit(layer, x):
    packed, plain = layer
    weight = packed.weight
    restore(packed)
    restore(packed)
    assert type(packed) is nn.Linear
    assert packed.weight is weight
    assert vars(packed).keys() == vars(plain).keys()
    assert torch.equal(packed.weight, plain.weight)
    assert torch.equal(packed(x), plain(x))


def test_its_state_is_the_plain_layer_s(layer):
    packed, plain = layer
    for name, tensor in plain.state_dict().items():
        assert torch.equal(packed.state_dict()[name], tensor)


def test_loading_a_state_counts_at_once(layer, x):
    packed, _ = layer
    other = nn.Linear(24, 40).bfloat16().requires_grad_(False)
    packed.load_state_dict(other.state_dict())
    assert torch.equal(packed(x), other(x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_and_pickles_are_plain_layers(layer, x, duplicate):
    packed, plain = layer
    other = duplicate(packed)
    assert type(other) is nn.Linear
    assert torch.equal(other(x), plain(x))
    other.weight.zero_()
    assert packed(x).any()
    assert torch.equal(packed.state_dict()["weight"], plain.weight)


def test_a_model_that_holds_it_is_copied_with_its_weights(layer, x):
    packed, plain = layer
    other = copy.deepcopy(nn.Sequential(packed, nn.ReLU()))
    assert torch.equal(other(x), plain(x).relu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_another_dtype_restores_it(layer, dtype):
    packed, plain = layer
    packed.to(dtype)
    assert torch.equal(packed.weight, plain.weight.to(dtype))
    x = torch.randn(3, 24, dtype=dtype)
    assert torch.equal(packed(x), plain.to(dtype)(x))


def test_an_assigned_weight_counts_at_once(layer, x):
    packed, plain = layer
    packed.weight = nn.Parameter(torch.zeros(40, 24).bfloat16(), requires_grad=False)
    assert torch.equal(packed(x), plain.bias.expand(3, 40))
    packed.weight.data = plain.weight.clone()
    torch.testing.assert_close(packed(x), plain(x), rtol=2e-2, atol=2e-2)


def test_a_bias_that_changes_counts_at_once(layer, x):
    packed, plain = layer
    packed.bias.data += 3
    plain.bias.data += 3
    torch.testing.assert_close(packed(x), plain(x), rtol=2e-2, atol=2e-2)


def test_writing_into_a_weight_is_an_error_or_counts_at_once(layer, x):
    packed, plain = layer
    if isinstance(packed, FrozenPackedLinear):
        for write in (lambda: packed.weight.mul_(2), lambda: packed.weight.data.add_(1)):
            with pytest.raises(RuntimeError):
                write()
        torch.testing.assert_close(packed(x), plain(x), rtol=2e-2, atol=2e-2)
        return
    packed.weight.data += 1  # leaves no trace in torch
    plain.weight.data += 1
    assert torch.equal(packed(x), plain(x))
    packed.weight.mul_(2)
    plain.weight.mul_(2)
    assert torch.equal(packed(x), plain(x))


def test_reading_the_absent_weight_is_noticed():
    layer = nn.Linear(8, 8).bfloat16().requires_grad_(False)
    pack_layer(layer, keep_dense=False)
    assert layer.weight.isnan().all()


def test_gradients_flow_as_before(layer, x):
    packed, plain = layer
    grads = []
    for module in (packed, plain):
        own = x.clone().requires_grad_()
        module(own).float().square().sum().backward()
        grads.append(own.grad)
    assert torch.equal(*grads)
    for module in (packed, plain):
        module.requires_grad_(True)
        module(x).float().square().sum().backward()
    assert torch.equal(packed.weight.grad, plain.weight.grad)
    assert torch.equal(packed.bias.grad, plain.bias.grad)


@pytest.mark.parametrize("keep_dense", [False, True])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_layer_packed_or_restored_in_any_mode_can_be_trained(mode, keep_dense, x):
    for step in (0, 1):
        layer = nn.Linear(24, 40).bfloat16().requires_grad_(False)
        with mode(mode=step == 0) if mode is torch.inference_mode else mode():
            pack_layer(layer, keep_dense=keep_dense)
        with mode(mode=step == 1) if mode is torch.inference_mode else mode():
            restore(layer)
        layer.requires_grad_(True)
        layer(x).float().sum().backward()
        assert layer.weight.grad.any()


@pytest.mark.parametrize("keep_dense", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 1), (1, 24), (1, 1)])
def test_a_layer_of_one_input_or_output_keeps_its_weight(inputs, outputs, keep_dense):
    """Gates of mixtures of experts are such layers."""
    layer = nn.Linear(inputs, outputs).bfloat16().requires_grad_(False)
    plain, x = copy.deepcopy(layer), torch.randn(3, inputs).bfloat16()
    pack_layer(layer, keep_dense=keep_dense)
    torch.testing.assert_close(layer(x), plain(x), rtol=2e-2, atol=2e-2)
    assert torch.equal(layer.weight, plain.weight)
    restore(layer)
    assert type(layer) is nn.Linear and torch.equal(layer.weight, plain.weight)
