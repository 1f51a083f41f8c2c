"""The decoding form of heads that attend takes the modules' steps, one at a time."""

import pytest
import torch

from medusa_spec.heads.config import LM_HEADS
from medusa_spec.heads.stacked import dense_linear
from medusa_spec.heads.steps import DraftSteps, FastLinear
from medusa_spec.heads.view import UnrolledView

H, V, K = 8, 20, 3
FAMILIES = [
    ("eagle", {}),
    ("eagle", {"tied": False, "bias": True}),
    ("eagle3", {"taps": "0,2"}),
    ("eagle3", {"tied": False, "taps": "1", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}),
    ("eagle3", {}),
]


def text(heads, length=5):
    h, ids = torch.randn(length, H, dtype=torch.float64), torch.randint(0, V, (length + K,))
    layers = torch.randn(length, len(heads.taps), H, dtype=torch.float64) if heads.taps else None
    return h, torch.stack([ids[1 + k : 1 + k + length] for k in range(K)], dim=-1), layers


def logits_of(steps, h, tokens, layers):
    """Draft logits of all rows by single steps, as a draft takes them."""
    view = UnrolledView(1, len(h), h.device, own=steps.num_sets > 1)
    feature, found = steps.begin(h, layers), []
    for k in range(K):
        feature = steps.step(k, feature, tokens[:, k], view.next())
        found.append(steps.logits(k, feature))
    return torch.stack(found)


def from_modules(heads, h, tokens, layers):
    extra = {} if layers is None else {"layers": layers[None]}
    return heads(h[None], tokens[None], **extra)[:, 0]


@pytest.mark.parametrize("draft", [False, True], ids=["all", "draft"])
@pytest.mark.parametrize("lm_head", LM_HEADS)
@pytest.mark.parametrize(("kind", "options"), FAMILIES, ids=str)
def test_steps_give_the_modules_logits(make, kind, options, lm_head, draft):
    heads, _ = make(kind, trained=True, lm_head=lm_head, draft=draft, lm_bias=True, softcap=3.0, **options)
    steps = DraftSteps(heads, dtype=torch.float64, device=torch.device("cpu"))
    assert steps.taps == heads.taps and steps.num_sets == heads.num_sets
    given = text(heads)
    torch.testing.assert_close(logits_of(steps, *given), from_modules(heads, *given))


@pytest.mark.parametrize("lm_head", LM_HEADS)
def test_steps_are_a_frozen_copy(make, lm_head):
    heads, _ = make("eagle3", trained=True, lm_head=lm_head, taps="0")
    steps, given = DraftSteps(heads, dtype=torch.float64, device=torch.device("cpu")), text(heads)
    before = logits_of(steps, *given)
    assert not before.requires_grad
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.mul_(-1.5)
    assert torch.equal(logits_of(steps, *given), before)
    assert all(parameter.requires_grad for parameter in heads.parameters())


def test_every_product_runs_on_the_linear_that_is_given(make):
    heads, _ = make("eagle3", trained=True, lm_head="low_rank", taps="0,1")
    asked = []

    def noting(weight, bias):
        asked.append(tuple(weight.shape))
        return dense_linear(weight, bias)

    steps = DraftSteps(heads, dtype=torch.float64, device=torch.device("cpu"), linear=noting)
    expected = [tuple(m.weight.shape) for m in heads.modules() if type(m) is torch.nn.Linear]
    assert sorted(asked) == sorted([*expected, (V, H)]) and len(expected) == 10  # and the shared LM head
    assert not any(type(m) is torch.nn.Linear for head in steps._heads for m in head.modules())
    assert all(type(m) is torch.nn.Linear for m in heads.modules() if isinstance(m, torch.nn.Linear))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_compute_in_the_targets_dtype(make, dtype):
    heads, _ = make("eagle", trained=True)
    steps = DraftSteps(heads, dtype=dtype, device=torch.device("cpu"))
    h, tokens, _ = text(heads)
    found = logits_of(steps, h.to(dtype), tokens, None)
    assert found.dtype == dtype
    expected = from_modules(heads, h, tokens, None).detach()
    torch.testing.assert_close(found.double(), expected, rtol=0.1, atol=0.1 * float(expected.abs().max()))
    assert heads.projection.weight.dtype == torch.float64


def test_a_fast_linear_is_the_layer_bias_and_all():
    layer, x = torch.nn.Linear(4, 3), torch.randn(2, 4)
    torch.testing.assert_close(FastLinear(layer, dense_linear)(x), layer(x))
    bare = torch.nn.Linear(4, 3, bias=False)
    torch.testing.assert_close(FastLinear(bare, dense_linear)(x), bare(x))
