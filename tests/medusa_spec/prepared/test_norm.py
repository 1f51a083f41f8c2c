"""Root-mean-square norms are found by what they compute, in the style in which they round, and nothing else is."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from medusa_spec.native.build import library
from medusa_spec.prepared.kernels import NORM_STYLES
from medusa_spec.prepared.norm import FastNorm, fasten_norm, norm_record, still_fits
from medusa_spec.prepared.packed_linear import available
from medusa_spec.prepared.swap import swap_back

pytestmark = pytest.mark.skipif(not available(), reason=f"no kernel on this machine: {library().reason}")
DTYPES = (torch.bfloat16, torch.float32)
KINDS = {LlamaRMSNorm: "scaled", GemmaRMSNorm: "centred", Olmo2RMSNorm: "scaled32", nn.RMSNorm: "scaled32"}


def frozen(module, dtype=torch.bfloat16):
    module = module.to(dtype).requires_grad_(False)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    return module


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def pair(kind, dtype):
    """A norm that was given the fast forward, and its plain copy."""
    plain = frozen(kind(40, eps=1e-5), dtype)
    fast = copy.deepcopy(plain)
    assert fasten_norm(fast)
    return fast, plain


def test_the_style_is_found(kind):
    record = norm_record(frozen(kind(40, eps=1e-5)))
    assert NORM_STYLES[record.style] == KINDS[kind]


def test_it_gives_what_the_plain_norm_gives_up_to_rounding(pair, dtype):
    fast, plain = pair
    for scale in (1e-3, 1.0, 100.0):
        x = (torch.randn(2, 7, 40) * scale).to(dtype)
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(fast(x), plain(x), rtol=4 * unit, atol=1e-8)
        assert dtype == torch.float32 or (fast(x) == plain(x)).float().mean() > 0.97


def test_strided_states_are_read_right(pair, dtype):
    fast, plain = pair
    x = torch.randn(40, 5, 2).to(dtype).permute(2, 1, 0)
    assert fast(x).shape == (2, 5, 40)
    torch.testing.assert_close(fast(x), plain(x), rtol=1e-2, atol=1e-2)


def test_a_weight_that_changes_counts_at_once(pair, dtype):
    fast, plain = pair
    x = torch.randn(3, 40).to(dtype)
    for norm in pair:
        norm.weight.data.mul_(3)
    torch.testing.assert_close(fast(x), plain(x), rtol=2e-2, atol=1e-6)
    for norm in pair:
        norm.weight = nn.Parameter(torch.ones(40, dtype=dtype), requires_grad=False)
    torch.testing.assert_close(fast(x), plain(x), rtol=2e-2, atol=1e-6)


def test_gradients_flow_as_before(pair, dtype):
    fast, plain = pair
    grads = []
    for norm in (fast, plain):
        x = torch.linspace(-1, 1, 40).to(dtype).requires_grad_()
        norm(x).float().square().sum().backward()
        norm.requires_grad_(True)
        norm(x.detach()).float().square().sum().backward()
        grads.append((x.grad, norm.weight.grad))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


@pytest.mark.parametrize("other", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_another_dtype_is_as_before(pair, other):
    fast, plain = (norm.to(other) for norm in pair)
    x = torch.randn(3, 40).to(other)
    torch.testing.assert_close(fast(x), plain(x), rtol=4 * torch.finfo(other).eps, atol=1e-9)


@pytest.mark.filterwarnings("ignore:Mismatch dtype:UserWarning")
def test_states_of_another_dtype_are_as_before(pair):
    fast, plain = pair
    x = torch.randn(3, 40, dtype=torch.float64)
    assert fast(x).dtype == plain(x).dtype
    assert torch.equal(fast(x), plain(x))


def test_a_weight_the_kernel_cannot_read_does_not_fit(pair, dtype):
    fast, _ = pair
    record = vars(fast)["_medusa_spec_fast"]
    assert still_fits(fast, record, 40)
    assert not still_fits(fast, record, 39)
    fast.weight.data = fast.weight.data.double()
    assert not still_fits(fast, record, 40)
    fast.weight.data = torch.ones(80, dtype=dtype)[::2]
    assert not still_fits(fast, record, 40)
    assert torch.isfinite(fast(torch.randn(3, 40).to(dtype))).all()


def test_another_epsilon_counts_at_once(pair, dtype):
    fast, plain = pair
    for norm in pair:
        setattr(norm, "eps" if hasattr(norm, "eps") else "variance_epsilon", 0.7)
    x = torch.randn(3, 40).to(dtype)
    assert torch.equal(fast(x), plain(x))


def test_swapping_back_gives_the_plain_norm(pair, dtype):
    fast, plain = pair
    swap_back(fast)
    x = torch.randn(3, 40).to(dtype)
    assert type(fast) is type(plain) and torch.equal(fast(x), plain(x))


class LearntEpsilon(LlamaRMSNorm):
    """A norm with a second parameter."""

    def __init__(self, width):
        super().__init__(width)
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return super().forward(x) + self.shift


class Centred(LlamaRMSNorm):
    """A norm that takes the mean away first."""

    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class Bounded(LlamaRMSNorm):
    """A norm of clamped states."""

    def forward(self, x):
        return super().forward(x.clamp(-20, 20))


class FirstMoment(LlamaRMSNorm):
    """A norm by the mean of absolute values."""

    def forward(self, x):
        return self.weight * (x / (x.abs().mean(-1, keepdim=True) + self.variance_epsilon))


OTHERS = [
    nn.LayerNorm(40),
    nn.LayerNorm(40, bias=False),
    nn.RMSNorm(40),  # without an epsilon of its own
    nn.RMSNorm((4, 10), eps=1e-5),
    nn.RMSNorm(40, eps=1e-5, elementwise_affine=False),
    nn.GroupNorm(1, 40),
    nn.Linear(40, 40),
    nn.Dropout(),
    LearntEpsilon(40),
    Centred(40),
    Bounded(40),
    FirstMoment(40),
]


@pytest.mark.parametrize("module", OTHERS, ids=lambda module: repr(module)[:30])
def test_other_modules_are_left_alone(module, dtype):
    module = frozen(copy.deepcopy(module), dtype)
    kind = type(module)
    assert not fasten_norm(module)
    assert type(module) is kind


def test_norms_that_train_or_are_hooked_in_place_are_left_alone():
    assert not fasten_norm(LlamaRMSNorm(40).bfloat16())
    norm = frozen(LlamaRMSNorm(40))
    norm.forward = norm.forward
    assert not fasten_norm(norm)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_norm_whose_weight_is_not_finite_is_left_alone(value):
    norm = frozen(LlamaRMSNorm(40))
    norm.weight[3] = value
    assert not fasten_norm(norm)


def test_other_dtypes_are_left_alone():
    assert not fasten_norm(frozen(LlamaRMSNorm(40), torch.float64))


@pytest.mark.parametrize("width", [1, 15, 16, 17, 33])
def test_every_width_is_right(width, dtype):
    plain = frozen(LlamaRMSNorm(width), dtype)
    fast = copy.deepcopy(plain)
    assert fasten_norm(fast) and isinstance(fast, FastNorm)
    x = torch.randn(9, width).to(dtype)
    torch.testing.assert_close(fast(x), plain(x), rtol=4 * torch.finfo(dtype).eps, atol=1e-8)
    assert fast(x[:0]).shape == (0, width)
