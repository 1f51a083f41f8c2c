"""The kernel is a linear layer, for every shape, and packing loses no bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_spec.native.build import library
from medusa_spec.prepared import packed_linear
from medusa_spec.prepared.packed_linear import PackedLinear, available, fast_linear, pack, unpack


def reference(x, weight, bias):
    """In float64, rounded once."""
    out = x.double() @ weight.double().T
    return (out if bias is None else out + bias.double()).bfloat16()


pytestmark = pytest.mark.skipif(not available(), reason=f"no kernel on this machine: {library().reason}")


@given(outputs=st.integers(1, 140), inputs=st.integers(1, 70), seed=st.integers(0, 99))
def test_unpack_is_the_inverse_of_pack(outputs, inputs, seed):
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)).bfloat16()
    assert torch.equal(unpack(pack(weight), outputs), weight)


@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 140),
    inputs=st.integers(1, 130),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_kernel_equals_the_exact_product_rounded_once(rows, outputs, inputs, bias, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    b = torch.randn(outputs, generator=generator).bfloat16() if bias else None
    got, exact = PackedLinear(weight)(x, b), reference(x, weight, b)
    # float32 sums of bfloat16 products may round to the neighbouring bfloat16, never further
    ulp = torch.maximum(exact.abs().float() * 2.0**-7, torch.tensor(1e-3))
    assert ((got.float() - exact.float()).abs() <= ulp).all()
    assert (got != exact).float().mean() < 0.02 or rows * outputs < 200


def test_leading_dimensions_and_strides_are_kept():
    weight = torch.randn(48, 24).bfloat16()
    x = torch.randn(24, 3, 2).bfloat16().permute(2, 1, 0)
    out = PackedLinear(weight)(x)
    assert out.shape == (2, 3, 48)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight), rtol=2e-2, atol=2e-2)


def test_the_result_does_not_depend_on_the_number_of_threads():
    weight, x = torch.randn(256, 96).bfloat16(), torch.randn(9, 96).bfloat16()
    linear, threads = PackedLinear(weight), torch.get_num_threads()
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(linear(x))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_a_row_does_not_depend_on_the_rows_beside_it():
    weight, x = torch.randn(96, 64).bfloat16(), torch.randn(19, 64).bfloat16()
    linear = PackedLinear(weight)
    together = linear(x)
    assert all(torch.equal(together[row], linear(x[row, None])[0]) for row in range(19))


def test_infinities_and_nan_pass_through():
    x = torch.tensor([[float("inf"), 0.0], [float("nan"), 1.0], [3e38, 3e38]]).bfloat16()
    out = PackedLinear(torch.ones(1, 2).bfloat16())(x)[:, 0]
    assert out[0] == float("inf")
    assert out[1].isnan()
    assert out[2] == float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_dtypes_take_torch_s_linear(dtype):
    weight, x = torch.randn(8, 4, dtype=dtype), torch.randn(2, 4, dtype=dtype)
    assert torch.equal(fast_linear(weight)(x), torch.nn.functional.linear(x, weight))


def test_without_the_kernel_torch_s_linear_serves(monkeypatch):
    monkeypatch.setattr(packed_linear, "_kernel", lambda: None)
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
    with pytest.raises(ValueError, match="bfloat16 on the CPU with 32 features"):
        PackedLinear(torch.randn(64, 32).bfloat16())(x)
