"""Kernels give what float64 gives, and a row's result does not depend on what stands beside it."""

import ctypes
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from medusa_spec.native.build import Library, library
from medusa_spec.prepared import kernels as kernels_module
from medusa_spec.prepared.kernels import (
    ACTIVATIONS,
    ELEMENTS,
    NORM_STYLES,
    AttentionCall,
    DraftCall,
    LayerCall,
    LinearCall,
    NormCall,
    RowCall,
    block_width,
    kernels,
    readable,
    takes,
)
from medusa_spec.prepared.packed_linear import PackedLinear

needs_kernels = pytest.mark.skipif(library().handle is None, reason=f"no kernels on this machine: {library().reason}")
DTYPES = tuple(ELEMENTS)
EXACT = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def gated(gate_up, kind="silu", threads=1):
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, width, dtype=gate_up.dtype)
    index = ACTIVATIONS.index(kind)
    kernels(gate_up.dtype).gated(gate_up.data_ptr(), y.data_ptr(), rows, width, index, threads)
    return y


def norm(x, weight, style="scaled", epsilon=1e-5, threads=1):
    y, index = torch.empty_like(x), NORM_STYLES.index(style)
    kernels(x.dtype).norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), *x.shape, epsilon, index, threads)
    return y


def exact_norm(x, weight, style, epsilon=1e-5):
    """In float64 but for the one rounding in the middle that a style asks for."""
    wide = x.double()
    scaled = wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt()
    if style == "scaled":
        return weight.double() * scaled.to(x.dtype).double()
    return scaled * (weight.double() + 1.0 if style == "centred" else weight.double())


def random(*shape, seed=0, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def activate(values, kind):
    """An activation alone: up is one."""
    x = torch.as_tensor(values, dtype=torch.float32)
    return gated(torch.cat([x, torch.ones_like(x)])[None], kind)[0]


@needs_kernels
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_are_exact_to_a_few_units_in_the_last_place(kind):
    x = torch.cat([torch.linspace(-120, 120, 40001), torch.logspace(-30, 38, 2001), -torch.logspace(-30, 38, 2001)])
    exact = EXACT[kind](x.double())
    error = (activate(x, kind).double() - exact).abs()
    of_argument = 1.5e-7 if kind == "gelu_tanh" else 0.0  # 1 + tanh cancels where it falls to zero
    assert (error <= 2.5e-7 * exact.abs() + of_argument * x.double().abs() + 1e-35).all()


@needs_kernels
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("value", [0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 88.5, -88.5, 89.0, -89.0])
def test_activations_of_extreme_values_are_torch_s(kind, value):
    got, expected = activate([value] * 3, kind), EXACT[kind](torch.tensor([value] * 3))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-30, equal_nan=True)


@needs_kernels
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 100),
    kind=st.sampled_from(ACTIVATIONS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_the_gated_kernel_is_activation_times_up_and_rounds_in_between(rows, width, kind, dtype, seed):
    gate_up = random(rows, 2 * width, seed=seed, dtype=dtype, scale=4.0)
    gate, up = gate_up.split(width, dim=1)
    expected = EXACT[kind](gate.double()).to(dtype).double() * up.double()
    error = (gated(gate_up, kind).double() - expected).abs()
    # float32 may fall on the other side of the rounding in between, and 1 + tanh cancels
    assert (error <= 1.6 * torch.finfo(dtype).eps * expected.abs() + 2e-7 * (gate * up).double().abs()).all()


@needs_kernels
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 200),
    style=st.sampled_from(NORM_STYLES),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_norms_equal_the_exact_ones(rows, width, style, dtype, seed):
    x, weight = random(rows, width, seed=seed, dtype=dtype), random(width, seed=seed + 1, dtype=dtype)
    got, expected = norm(x, weight, style).double(), exact_norm(x, weight, style)
    # float32's own error may tip the rounding in the middle, and the one at the end
    torch.testing.assert_close(got, expected, rtol=1.01 * torch.finfo(dtype).eps + 2e-6, atol=1e-30)
    if dtype == torch.bfloat16 and rows * width > 200:
        assert (got != expected.to(dtype).double()).double().mean() < 0.02


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("style", NORM_STYLES)
def test_a_norm_may_be_computed_in_place(style, dtype):
    x, weight = random(5, 37, dtype=dtype), random(37, seed=1, dtype=dtype)
    expected = norm(x, weight, style)
    kernels(dtype).norm(x.data_ptr(), weight.data_ptr(), x.data_ptr(), 5, 37, 1e-5, NORM_STYLES.index(style), 1)
    assert torch.equal(x, expected)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [33, 640])
def test_rows_depend_on_neither_their_neighbours_nor_threads(width, dtype):
    x, weight = random(40, width, dtype=dtype), random(width, seed=1, dtype=dtype)
    gate_up = random(40, 2 * width, seed=2, dtype=dtype)
    normed, middle = norm(x, weight), gated(gate_up)
    for threads in (2, 3, 7):
        assert torch.equal(norm(x, weight, threads=threads), normed)
        assert torch.equal(gated(gate_up, threads=threads), middle)
    for row in range(40):
        assert torch.equal(norm(x[row : row + 1].clone(), weight)[0], normed[row])
        assert torch.equal(gated(gate_up[row : row + 1].clone())[0], middle[row])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_pass_through(dtype):
    x = torch.ones(3, 20, dtype=dtype)
    x[0, 3], x[1, 17] = math.nan, math.inf
    y = norm(x, torch.ones(20, dtype=dtype))
    assert y[0].isnan().all() and y[1, 17].isnan() and (y[1, :17] == 0).all()
    torch.testing.assert_close(y[2].float(), torch.ones(20))
    assert gated(torch.full((1, 2), math.nan, dtype=dtype)).isnan().all()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_layer_kernel_asks_for_room_for_its_parts(dtype):
    """Inputs, elements in between and what attention itself asks for; of a batch, for each of its rows."""
    attention = AttentionCall(nodes=5, q_heads=4, kv_heads=2, dim=24, first=3, common=4, end=40)
    sizes = {"qkv": (48, 192), "o": (96, 48), "gate_up": (48, 128), "down": (64, 48)}
    linears = {name: LinearCall(inputs=inputs, outputs=outputs) for name, (inputs, outputs) in sizes.items()}
    call = LayerCall(hidden=48, attention=attention, **linears)
    asked = kernels(dtype).attention_scratch
    assert asked(attention) == attention_room(attention, 5, 42)
    phases, room = 11 * 16, 5 * (96 + 192 + 48 + 64) + asked(attention)
    assert kernels(dtype).layers_scratch(ctypes.byref(call), 1) == room + phases
    assert kernels(dtype).layers_scratch((LayerCall * 3)(call, call, call), 3) == room + 3 * phases
    rows = (RowCall * 2)(RowCall(nodes=2, first=3, end=40), RowCall(nodes=3, end=90))
    attention.rows, attention.batch = ctypes.addressof(rows), 2
    assert asked(attention) == attention_room(attention, 2, 39) + attention_room(attention, 3, 93)


def attention_room(attention: AttentionCall, nodes: int, keys: int) -> int:
    """Floats: queries, scores and a factor for each; the former up to whole registers, the scores to whole blocks."""
    block = block_width()
    padded, stride = (-(-size // unit) * unit for size, unit in ((attention.dim, block // 2), (keys, block)))
    return attention.q_heads * nodes * (padded + stride + 1)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_draft_kernel_asks_for_room_for_what_its_layer_reads(dtype):
    """Both inputs side by side, and the joined ones as floats and as elements."""
    layer = LayerCall(hidden=48, attention=AttentionCall(nodes=5, q_heads=4, kv_heads=2, dim=24, end=40))
    own, phases = kernels(dtype).layers_scratch(ctypes.byref(layer), 1), 2 * 16 + 16
    assert kernels(dtype).draft_scratch(DraftCall(layer=layer)) == own + phases + 5 * 4 * 48


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_reads_what_enters_it_in_place_of_its_norm(dtype):
    """Of another width than the states, whose norm is then not asked for; the result is that of its parts."""
    hidden, width, dim, nodes = 48, 80, 32, 3
    shapes = {"qkv": (3 * dim, width), "o": (hidden, dim), "gate_up": (128, hidden), "down": (hidden, 64)}
    packed = {name: PackedLinear(random(*shape, dtype=dtype, scale=0.2)) for name, shape in shapes.items()}
    x, entered = random(nodes, hidden, seed=7, dtype=dtype), random(nodes, width, seed=8, dtype=dtype)
    scale, mask = random(hidden, seed=9, dtype=dtype), torch.ones(nodes, nodes, dtype=torch.bool).tril()
    keys, values = torch.zeros(1, nodes, dim, dtype=dtype), torch.zeros(1, nodes, dim, dtype=dtype)
    ones, zeros = torch.ones(nodes, dim, dtype=dtype), torch.zeros(nodes, dim, dtype=dtype)
    wide, out = entered.float().contiguous(), torch.empty_like(x)
    sizes = {"nodes": nodes, "q_heads": 1, "kv_heads": 1, "dim": dim, "rotary": dim, "head_stride": nodes * dim}
    tensors = {"keys": keys, "values": values, "mask": mask, "cosine": ones, "sine": zeros}
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    attention = AttentionCall(scale=0.5, threads=1, **sizes, **addresses)
    call = LayerCall(hidden=hidden, attention=attention, activation=ACTIVATIONS.index("silu"), entered=wide.data_ptr())
    call.second_norm = NormCall(weight=scale.data_ptr(), epsilon=1e-5, style=0)
    for name, linear in packed.items():
        field = LinearCall(weight=linear.packed.data_ptr(), inputs=linear.inputs, outputs=linear.outputs)
        setattr(call, name, field)
    scratch = torch.empty(kernels(dtype).layers_scratch(call, 1))
    kernels(dtype).layers(call, 1, x.data_ptr(), out.data_ptr(), scratch.data_ptr())
    query, key, value = packed["qkv"](entered).split(dim, dim=1)
    assert torch.equal(keys[0], key) and torch.equal(values[0], value)
    scores = (query.double() @ key.double().T * 0.5).masked_fill(~mask, -math.inf)
    middle = x + packed["o"]((scores.softmax(-1) @ value.double()).to(dtype))
    expected = middle + packed["down"](gated(packed["gate_up"](norm(middle, scale))))
    torch.testing.assert_close(out, expected, rtol=2 * torch.finfo(dtype).eps, atol=40 * torch.finfo(dtype).eps)


def test_there_are_no_kernels_for_other_dtypes():
    assert kernels(torch.float64) is None
    assert kernels(torch.float16) is None


def test_without_a_library_there_are_no_kernels(monkeypatch):
    monkeypatch.setattr(kernels_module, "library", lambda: Library(handle=None, reason="for the test"))
    assert kernels.__wrapped__(torch.float32) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_take_only_what_they_can_read(dtype):
    x = torch.ones(2, dtype=dtype)
    assert takes(x, dtype) and readable(x, dtype)
    assert not takes(x.double(), dtype)
    assert not takes(x.to("meta"), dtype)


def test_kernels_take_no_tensor_without_memory():
    with FakeTensorMode():
        assert not takes(torch.ones(2), torch.float32)


def test_kernels_take_no_gradient():
    x = torch.ones(2, requires_grad=True)
    assert not takes(x, torch.float32)
    with torch.no_grad():
        assert takes(x, torch.float32)
    with torch.inference_mode():
        assert takes(torch.ones(2), torch.float32)


def test_kernels_stand_aside_for_autocast_to_another_dtype():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not takes(torch.ones(2), torch.float32)
        assert takes(torch.ones(2).bfloat16(), torch.bfloat16)


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_kernels_stand_aside_for_tracers():
    taken = []
    torch.jit.trace(lambda x: taken.append(takes(x, torch.float32)) or x + 1, torch.ones(2), check_trace=False)
    assert taken == [False]
