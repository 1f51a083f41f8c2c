"""The kernel is a linear layer, for every shape, and packing loses no bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.native.build import library
from medusa_spec.prepared import packed_linear
from medusa_spec.prepared.packed_linear import PackedLinear, available, fast_linear, pack, packed_size, unpack

pytestmark = pytest.mark.skipif(not available(), reason=f"no kernel on this machine: {library().reason}")
DTYPES = (torch.bfloat16, torch.float32)


def random(*shape, seed, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(outputs=st.integers(1, 140), inputs=st.integers(1, 70), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_unpack_is_the_inverse_of_pack(outputs, inputs, dtype, seed):
    weight = random(outputs, inputs, seed=seed, dtype=dtype)
    assert torch.equal(unpack(pack(weight), outputs), weight)


def test_packing_keeps_every_bit_of_nan_and_infinity():
    weight = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    assert torch.equal(unpack(pack(weight), 256).view(torch.int16), weight.view(torch.int16))


@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 140),
    inputs=st.integers(1, 130),
    bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_the_kernel_equals_the_exact_product_rounded_once(rows, outputs, inputs, bias, dtype, seed):
    weight = random(outputs, inputs, seed=seed, dtype=dtype)
    x = random(rows, inputs, seed=seed + 1, dtype=dtype)
    b = random(outputs, seed=seed + 2, dtype=dtype) if bias else None
    got = PackedLinear(weight)(x, b)
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias:
        exact, size = exact + b.double(), size + b.double().abs()
    summed = (inputs + 1) * 2.0**-24 * size  # what float32 sums may lose
    rounded = exact.abs() * torch.finfo(dtype).eps / 2 * (dtype == torch.bfloat16)
    assert got.dtype == dtype
    assert ((got.double() - exact).abs() <= 1.01 * (summed + rounded)).all()


def test_leading_dimensions_and_strides_are_kept():
    weight = torch.randn(48, 24).bfloat16()
    x = torch.randn(24, 3, 2).bfloat16().permute(2, 1, 0)
    out = PackedLinear(weight)(x)
    assert out.shape == (2, 3, 48)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_result_does_not_depend_on_the_number_of_threads(dtype):
    weight, x = torch.randn(256, 96).to(dtype), torch.randn(9, 96).to(dtype)
    linear, threads = PackedLinear(weight), torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5, 16):  # more threads than blocks, too
            torch.set_num_threads(count)
            results.append(linear(x))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs", [1, 63, 64, 65, 200])
def test_a_row_does_not_depend_on_the_rows_beside_it(inputs, dtype):
    weight, x = torch.randn(96, inputs).to(dtype), torch.randn(70, inputs).to(dtype)
    linear = PackedLinear(weight)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in (2, 3, 13, 14, 15, 28, 29, 56, 57, 70):  # around the rows of a tile, and of a group of tiles
        assert torch.equal(linear(x[:rows]), alone[:rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_joined_layers_give_what_each_gives_alone(dtype):
    weights = [torch.randn(outputs, 40).to(dtype) for outputs in (64, 32, 17)]
    memory = torch.empty(sum(packed_size(*weight.shape) for weight in weights), dtype=dtype)
    into = memory.split([packed_size(*weight.shape) for weight in weights])
    parts = [PackedLinear(weight, place) for weight, place in zip(weights, into, strict=True)]
    x, joined = torch.randn(5, 40).to(dtype), PackedLinear.joined(parts, memory)
    assert (joined.outputs, joined.inputs) == (113, 40)
    assert torch.equal(joined(x), torch.cat([part(x) for part in parts], dim=-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_rows_give_no_rows(dtype):
    assert PackedLinear(torch.randn(8, 4).to(dtype))(torch.empty(2, 0, 4, dtype=dtype)).shape == (2, 0, 8)


def test_infinities_and_nan_pass_through():
    x = torch.tensor([[float("inf"), 0.0], [float("nan"), 1.0], [3e38, 3e38]]).bfloat16()
    out = PackedLinear(torch.ones(1, 2).bfloat16())(x)[:, 0]
    assert out[0] == float("inf")
    assert out[1].isnan()
    assert out[2] == float("inf")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_take_torch_s_linear(dtype):
    weight, x = torch.randn(8, 4, dtype=dtype), torch.randn(2, 4, dtype=dtype)
    assert torch.equal(fast_linear(weight)(x), torch.nn.functional.linear(x, weight))


def test_without_the_kernel_torch_s_linear_serves(monkeypatch):
    monkeypatch.setattr(packed_linear, "kernels", lambda dtype: None)
    weight, x = torch.randn(8, 4).bfloat16(), torch.randn(2, 4).bfloat16()
    assert torch.equal(fast_linear(weight)(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_users_default_dtype_changes_nothing(dtype):
    """Memory that the kernel writes to is of its own dtype: a smaller one would be written past its end."""
    linear, x = PackedLinear(torch.randn(64, 512).bfloat16()), torch.randn(16, 512).bfloat16()
    expected = linear(x)
    torch.set_default_dtype(dtype)
    try:
        assert all(torch.equal(linear(x), expected) for _ in range(20))
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_users_default_device_changes_nothing():
    linear, x = PackedLinear(torch.randn(64, 32).bfloat16()), torch.randn(3, 32).bfloat16()
    expected = linear(x)
    with torch.device("meta"):
        assert torch.equal(linear(x), expected)


@pytest.mark.parametrize(
    "x",
    [torch.ones(4, 16).bfloat16(), torch.ones(4, 32), torch.ones(4, 32, device="meta").bfloat16()],
    ids=["width", "dtype", "device"],
)
def test_what_the_kernel_would_misread_is_an_error(x):
    with pytest.raises(ValueError, match="bf16 on the CPU with 32 features"):
        PackedLinear(torch.randn(64, 32).bfloat16())(x)
