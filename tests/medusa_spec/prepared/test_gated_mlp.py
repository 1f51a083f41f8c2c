"""Gated MLPs are found by what they compute, and run in one product while they are what was found."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP

from medusa_spec.native.build import library
from medusa_spec.prepared.gated_mlp import NAMES, FastGatedMlp, activation_of, fasten_gated_mlp
from medusa_spec.prepared.joined import JoinedLinear, pack_together
from medusa_spec.prepared.kernels import ACTIVATIONS
from medusa_spec.prepared.packed_layer import pack_layer
from medusa_spec.prepared.packed_linear import available

pytestmark = pytest.mark.skipif(not available(), reason=f"no kernel on this machine: {library().reason}")


def mlp(kind=LlamaMLP, *, dtype=torch.bfloat16, activation="silu", bias=False, width=96):
    config = SimpleNamespace(hidden_size=40, intermediate_size=width, hidden_act=activation, mlp_bias=bias)
    return kind(config).to(dtype).requires_grad_(False).eval()


def fasten(module):
    memory = pack_together([getattr(module, name) for name in NAMES])
    pack_layer(module.down_proj, keep_dense=False)
    return fasten_gated_mlp(module, JoinedLinear(module, NAMES, memory))


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def pair(dtype):
    """A fast MLP and its plain copy."""
    plain = mlp(dtype=dtype)
    fast = copy.deepcopy(plain)
    assert fasten(fast)
    return fast, plain


def close(got, expected):
    unit = max(torch.finfo(expected.dtype).eps, 2e-6)
    assert got.dtype == expected.dtype and got.shape == expected.shape
    return (got.double() - expected.double()).norm() <= 2 * unit * expected.double().norm()


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu_new"])
def test_it_gives_what_the_plain_mlp_gives_up_to_rounding(activation, bias, dtype):
    plain = mlp(dtype=dtype, activation=activation, bias=bias)
    fast = copy.deepcopy(plain)
    assert fasten(fast) and isinstance(fast, FastGatedMlp)
    for rows in (1, 7, 30):
        for scale in (1e-2, 1.0, 50.0):
            x = (torch.randn(2, rows, 40) * scale).to(dtype)
            assert close(fast(x), plain(x))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("silu", "silu"),
        ("swish", "silu"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_new", "gelu_tanh"),
        ("gelu", None),
        ("quick_gelu", None),
        ("relu", None),
        ("relu2", None),
        ("mish", None),
    ],
)
def test_activations_are_told_apart(name, found):
    index = activation_of(ACT2FN[name])
    assert (None if index is None else ACTIVATIONS[index]) == found


def test_what_is_no_activation_is_none():
    assert activation_of(None) is None
    assert activation_of("silu") is None


class Swapped(LlamaMLP):
    """The activation on the other half."""

    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class Clamped(LlamaMLP):
    """Clamped far outside the usual."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=50) * self.up_proj(x).clamp(-50, 50))


class Scaled(LlamaMLP):
    """Times a constant."""

    def forward(self, x):
        return super().forward(x) * 1.1


class Residual(LlamaMLP):
    """With its input on top."""

    def forward(self, x):
        return super().forward(x) + x


@pytest.mark.parametrize("kind", [Swapped, Clamped, Scaled, Residual])
def test_other_mlps_are_left_alone(kind, dtype):
    module = mlp(kind, dtype=dtype)
    assert not fasten(module)
    assert type(module) is kind


def test_an_unknown_activation_is_left_alone(dtype):
    assert not fasten(mlp(dtype=dtype, activation="relu"))


CHANGES = {
    "activation exchanged": lambda m: setattr(m, "act_fn", nn.ReLU()),
    "activation hooked": lambda m: m.act_fn.register_forward_hook(lambda module, args, out: out * 2),
    "gate hooked": lambda m: m.gate_proj.register_forward_hook(lambda module, args, out: out * 2),
    "up wrapped": lambda m: setattr(m, "up_proj", nn.Sequential(m.up_proj, nn.ReLU())),
    "down hooked": lambda m: m.down_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "down exchanged": lambda m: setattr(m, "down_proj", nn.Identity()),
    "hooked": lambda m: m.register_forward_hook(lambda module, args, out: out * 2),
    "weights loaded": lambda m: m.load_state_dict({name: tensor * 2 for name, tensor in m.state_dict().items()}),
    "cast": lambda m: m.double(),
    "cast and back": lambda m: m.double().to(torch.bfloat16),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_is_changed_afterwards_counts_at_once(pair, change):
    for module in pair:
        change(module)
    fast, plain = pair
    parameters = list(fast.gate_proj.parameters())
    x = torch.randn(5, 40).to(parameters[0].dtype)
    assert close(fast(x), plain(x))


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_a_layer_that_is_trained_gets_its_gradient(pair, name, dtype):
    x = torch.linspace(-1, 1, 200).view(5, 40).to(dtype)
    grads = []
    for module in pair:
        getattr(module, name).requires_grad_(True)
        module(x).float().square().sum().backward()
        grads.append(getattr(module, name).weight.grad)
    assert close(*grads)


def test_dropout_in_training_is_kept(dtype):
    class Dropping(LlamaMLP):
        """With a dropout that acts in training alone."""

        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 1.0, self.training)

    module = mlp(Dropping, dtype=dtype)
    assert fasten(module)
    assert module(torch.ones(2, 40, dtype=dtype)).any()
    assert not module.train()(torch.ones(2, 40, dtype=dtype)).any()


def test_other_arguments_are_the_plain_module_s_business(pair, dtype):
    fast, plain = pair
    x = torch.randn(3, 40).to(dtype)
    assert close(fast(x=x), plain(x=x))
    with pytest.raises(TypeError):
        fast(x, 1)
