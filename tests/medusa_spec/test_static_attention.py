from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec import static_attention
from medusa_spec.kernels import math_kernel
from medusa_spec.static_attention import StaticTreePass
from medusa_spec.static_tree import StaticTree
from medusa_spec.tree import TreeShape, chain, shape_of

CPU = torch.device("cpu")
BUSH = shape_of((-1, 0, 1, 0, 3, 2, 3, 5, 7))
PARENTS = st.integers(0, 9).flatmap(lambda n: st.tuples(st.just(-1), *(st.integers(0, i) for i in range(n))))
HQ, HKV, D, DV = 6, 2, 8, 4


@dataclass
class Buffers:
    """What attention asks of a static cache."""

    known: int
    capacity: int
    windows: tuple[int | None, ...] = (None,)
    device: torch.device = CPU

    def __post_init__(self) -> None:
        self.length = torch.tensor([self.known])

    def window(self, layer: int) -> int | None:
        return self.windows[layer]


def static_pass(shape: TreeShape, cache: Buffers, backend: str | None = None) -> StaticTreePass:
    cache.slots = cache.length + torch.arange(shape.size)
    return StaticTreePass(tree=StaticTree(shape=shape, device=CPU), cache=cache, backend=backend)


def seen_by_position(shape: TreeShape, length: int, capacity: int, window: int | None) -> torch.Tensor:
    """[N, capacity], slot by slot."""
    mask = torch.zeros(shape.size, capacity, dtype=torch.bool)
    for node, depth in enumerate(shape.depths):
        for slot in range(length):
            mask[node, slot] = window is None or length + depth - slot < window
        for other in shape.path_to(node):
            mask[node, length + other] = window is None or depth - shape.depths[other] < window
    return mask


@given(PARENTS, st.integers(0, 14), st.sampled_from([None, 1, 2, 4, 30]))
def test_every_node_sees_its_window_of_the_prefix_and_its_ancestors(parents, length, window):
    shape = shape_of(parents)
    run = static_pass(shape, Buffers(length, 24))
    reach, expected = run.reach(window), seen_by_position(shape, length, 24, window)
    if reach.slots is None:
        assert torch.equal(reach.mask, expected)
        return
    assert len(set(reach.slots.tolist())) == reach.slots.numel() < 24
    assert torch.equal(reach.mask, expected[:, reach.slots])
    elsewhere = [slot for slot in range(24) if slot not in reach.slots.tolist()]
    assert not expected[:, elsewhere].any()


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["", "softcap"])
@pytest.mark.parametrize("window", [None, 3, 6, 40], ids=["full", "window-3", "window-6", "window-40"])
@pytest.mark.parametrize("length", [0, 13])
@pytest.mark.parametrize("value_dim", [D, DV], ids=["", "narrow-values"])
def test_static_attention_is_dense_masked_attention(length, window, softcap, sinks, value_dim):
    cache = Buffers(length, 32, (window,))
    query, key, value = (
        torch.randn(1, heads, tokens, dim, dtype=torch.float64)
        for heads, tokens, dim in ((HQ, BUSH.size, D), (HKV, 32, D), (HKV, 32, value_dim))
    )
    s_aux = torch.randn(HQ, dtype=torch.float64) if sinks else None
    out, weights = static_pass(BUSH, cache).attend(
        SimpleNamespace(layer_idx=0), query, key, value, None, scaling=0.4, softcap=softcap, s_aux=s_aux, dropout=0.0
    )
    assert weights is None
    assert torch.allclose(out, by_hand(query, key, value, length, window, softcap, s_aux), rtol=1e-10, atol=1e-12)


def by_hand(query, key, value, length, window, softcap=None, s_aux=None):
    key, value = (states.repeat_interleave(HQ // HKV, dim=1) for states in (key, value))
    scores = query @ key.mT * 0.4
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen_by_position(BUSH, length, key.shape[2], window), -torch.inf)
    if s_aux is not None:
        column = s_aux.view(1, -1, 1, 1).expand(-1, -1, BUSH.size, 1)
        scores = torch.cat([scores, column], dim=-1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 4])
def test_prefix_and_tree_apart_are_the_whole(window, sinks, monkeypatch):
    called = []

    def prefix(query, key, value, length, nodes, scale, softcap):
        called.append((length.dtype, nodes))
        seen = slice(None, int(length))
        return math_kernel(query, key[:, :, seen], value[:, :, seen], None, scale, softcap)

    monkeypatch.setitem(static_attention.PREFIX_KERNELS, "varlen", prefix)
    query, key, value = (
        torch.randn(1, heads, tokens, D).bfloat16() for heads, tokens in ((HQ, BUSH.size), (HKV, 32), (HKV, 32))
    )
    s_aux = torch.randn(HQ) if sinks else None
    arguments = {"scaling": 0.4, "s_aux": s_aux}
    run = static_pass(BUSH, Buffers(13, 32, (window,)), backend="varlen")
    out, _ = run.attend(SimpleNamespace(layer_idx=0), query, key, value, **arguments)
    assert called == ([(torch.int32, BUSH.size)] if window is None else [])
    expected = by_hand(query.double(), key.double(), value.double(), 13, window, None, s_aux)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.double(), expected, rtol=2**-7, atol=2**-7)


def test_masks_are_made_once_per_pass_and_window():
    run = static_pass(BUSH, Buffers(5, 32, (None, 4)))
    full, sliding = run.reach(None), run.reach(4)
    assert run.reach(None) is full and run.reach(4) is sliding and full is not sliding
    bias = run.bias(full, 2, torch.float32)
    assert run.bias(full, 2, torch.float32) is bias and bias.shape == (1, 1, 2 * BUSH.size, 32)


def test_positions_are_prefix_length_and_depth():
    run = static_pass(BUSH, Buffers(7, 32))
    assert run.positions.tolist() == [[7 + depth for depth in BUSH.depths]]
    assert run.no_mask.ndim == 4 and not run.no_mask.any()


def test_scores_are_scaled_by_the_head_size_unless_told():
    states = [torch.randn(1, heads, tokens, D) for heads, tokens in ((HQ, 3), (HKV, 16), (HKV, 16))]
    run, module = static_pass(chain(2), Buffers(5, 16)), SimpleNamespace(layer_idx=0)
    assert torch.equal(run.attend(module, *states)[0], run.attend(module, *states, scaling=D**-0.5)[0])
