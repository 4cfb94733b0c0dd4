"""Packed products equal the decoded ones, within the bounds that the modules state."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4py.errors import KernelError, ModelError
from ds4py.kernels.cpu import linear as cpu
from ds4py.kernels.cpu.activations import quantize as rounded
from ds4py.layers import linear as module
from ds4py.layers.linear import DecodedWeights, KeepBudget, PackedLinear
from ds4py.quant.formats import format_of
from ds4py.quant.tensor import QuantTensor
from tests.unit.kernels.packed_matrices import buffer
from tests.unit.kernels.packed_matrices import matrix as random_blocks

PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K")
OTHER = ("IQ4_XS", "TQ1_0", "MXFP4")
"""Without a kernel."""

# Sums of random terms: far below the bounds of single weights (test_gemv.py), which are
# 1/8000 for few rows, and 2^-9 where weights, activations and results become bfloat16.
FEW_ERROR, MANY_ERROR = 1e-3, 6e-3
ROUNDED_ERROR = 8e-3
"""Half of 255 levels of each group's largest, for formats that become Q8_0."""


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def matrix(kind: str, rows: int, columns: int, seed: int = 0) -> QuantTensor:
    """Random weights; formats that `gguf` cannot quantize to are made of random bytes."""
    if kind in ("Q4_K", "Q6_K", "IQ4_XS"):
        return random_blocks(kind, (rows, columns), seed)
    rng, type_id = np.random.default_rng(seed), GGMLQuantizationType[kind]
    raw = quantize(rng.normal(0.01, 0.05, (rows, columns)).astype(np.float32), type_id)
    return QuantTensor.from_bytes(
        f"{kind}.weight", int(type_id), (rows, columns), memoryview(raw.tobytes()), "cpu"
    )


def copied(tensor: QuantTensor) -> QuantTensor:
    """Products take the bytes over, and change them."""
    return replace(tensor, raw=tensor.raw.clone())


def packed(*tensors: QuantTensor, **options) -> PackedLinear:
    return PackedLinear([copied(tensor) for tensor in tensors], **options)


def inputs(T: int, columns: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((T, columns), generator=generator).bfloat16()


def error_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.float() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("kind", [*PACKED, *OTHER, "F16", "BF16", "F32"])
@pytest.mark.parametrize("T", [1, 3, cpu.FEW_ROWS, cpu.FEW_ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bf16_product_is_close_to_the_decoded_f32_product(kind, T, dtype):
    weights = matrix(kind, 100, 256)
    x = inputs(T, 256).to(dtype)
    y = packed(weights, dtype=torch.bfloat16)(x)
    assert y.shape == (T, 100)
    assert y.dtype is dtype
    exact = kind in PACKED and T <= cpu.FEW_ROWS and dtype is torch.float32
    limit = (ROUNDED_ERROR if kind in OTHER else 0) + (FEW_ERROR if exact else MANY_ERROR)
    assert error_of(y, x.float() @ weights.decode().T) < limit


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(["Q4_1", "Q8_0"]),
    rows=st.integers(1, 200),
    groups=st.integers(1, 9),
    T=st.integers(0, 40),
    seed=st.integers(0, 1000),
)
def test_any_size_of_matrix_and_batch_gives_the_product(kind, rows, groups, T, seed):
    weights = matrix(kind, rows, 32 * groups, seed)
    x = inputs(T, 32 * groups, seed)
    y = packed(weights, dtype=torch.bfloat16)(x).float()
    expected = x.float() @ weights.decode().T
    # per element: rounding of every term and of the result
    scale = x.float().abs() @ weights.decode().abs().T
    assert ((y - expected).abs() <= 0.012 * scale + 1e-6).all()


@pytest.mark.parametrize("kind", OTHER)
def test_formats_without_a_kernel_are_rounded_by_at_most_half_a_level(kind):
    weights = matrix(kind, 40, 512)
    rounded = cpu.as_q8_0(weights)
    assert rounded.format.name == "Q8_0"
    assert rounded.shape == weights.shape
    expected = weights.decode().view(40, -1, 32)
    level = expected.abs().amax(2, keepdim=True) / 127
    # the level is a binary16 number, mostly below the normal ones here
    error = (rounded.decode().view(40, -1, 32) - expected).abs()
    assert (error <= 0.51 * level).all()


def test_rounding_to_q8_0_keeps_zeros_and_survives_tiny_weights():
    values = torch.zeros(2, 64)
    values[1, :32] = torch.linspace(-1e-9, 1e-9, 32)  # their level is below binary16
    raw = values.view(torch.uint8).view(2, -1)
    rounded = cpu.as_q8_0(QuantTensor("w", format_of(0, tensor="w"), (2, 64), raw))
    assert torch.equal(rounded.decode(), torch.zeros(2, 64))


def test_rounding_in_many_steps_gives_the_same_bytes_as_in_one(monkeypatch):
    weights = matrix("IQ4_XS", 100, 256)
    whole = cpu.as_q8_0(weights)
    monkeypatch.setattr(cpu, "_ROUND_VALUES", 7 * 256)
    assert torch.equal(cpu.as_q8_0(weights).raw, whole.raw)


@pytest.mark.parametrize("kind", [*PACKED, *OTHER])
def test_an_all_zero_matrix_stays_zero(kind):
    weights = matrix(kind, 64, 256)
    weights.raw.zero_()
    for T in (2, cpu.FEW_ROWS + 1):
        y = packed(weights, dtype=torch.bfloat16)(inputs(T, 256))
        assert torch.equal(y, torch.zeros(T, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", PACKED)
def test_both_ways_to_multiply_use_the_same_weights(kind):
    product, x = packed(matrix(kind, 100, 256), dtype=torch.bfloat16), inputs(20, 256)
    few = torch.cat([product(part) for part in x.split(5)])
    assert error_of(product(x), few.float()) < MANY_ERROR


def test_a_matrix_larger_than_a_piece_is_multiplied_piece_by_piece(monkeypatch):
    product, x = packed(matrix("Q4_1", 200, 64), dtype=torch.bfloat16), inputs(40, 64)
    whole = product(x)
    monkeypatch.setattr(cpu, "_DECODE_VALUES", 64 * 64)
    assert torch.equal(product(x), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "Q8_0", "Q6_K", "F16"])
def test_chosen_rows_are_the_rows_of_the_matrix(kind, dtype):
    weights = matrix(kind, 200, 256)
    index = torch.tensor([199, 0, 31, 32, 63, 64, 100, 0])
    rows = packed(weights, dtype=dtype).rows(index)
    assert rows.dtype is torch.float32
    tolerance = 0 if dtype is torch.float32 else MANY_ERROR if kind == "F16" else FEW_ERROR
    assert error_of(rows, weights.decode()[index]) <= tolerance


def test_a_packed_product_keeps_no_other_copy_of_its_weights():
    weights = matrix("Q4_1", 128, 256)
    product = PackedLinear([weights], dtype=torch.bfloat16)
    product(inputs(1, 256))
    (only,) = product._products
    assert only.packed._raw.address == weights.raw.data_ptr()


def test_the_f32_product_is_the_product_with_the_decoded_weights():
    weights = matrix("Q4_1", 100, 96)
    x = inputs(5, 96).float()
    y = PackedLinear([weights], dtype=torch.float32)(x)
    assert torch.equal(y, torch.nn.functional.linear(x, weights.decode()))


def test_kept_weights_give_the_same_bits_as_weights_decoded_again(monkeypatch):
    monkeypatch.setattr(module, "_PIECE_VALUES", 96 * 30)
    weights = matrix("Q4_1", 100, 96)
    x = inputs(5, 96).float()
    keeping = DecodedWeights(weights, torch.float32, KeepBudget(4 * 100 * 96))
    frugal = DecodedWeights(weights, torch.float32, KeepBudget(4 * 100 * 96 - 1))
    first, again, other = keeping(x), keeping(x), frugal(x)
    assert torch.equal(first, again)
    assert torch.equal(first, other)
    torch.testing.assert_close(first, x @ weights.decode().T)


def test_a_budget_is_spent_once():
    budget = KeepBudget(100)
    assert budget.take(60)
    assert not budget.take(60)
    assert budget.take(40)


@pytest.mark.parametrize("T", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", [("Q4_1", "Q4_1", "Q4_1"), ("Q4_1", "Q8_0", "F16")])
def test_matrices_stand_below_each_other_whatever_their_formats(kinds, dtype, T):
    weights = [matrix(kind, 64 + 10 * i, 64, seed=i) for i, kind in enumerate(kinds)]
    x = inputs(T, 64).to(dtype)
    together = packed(*weights, dtype=dtype)
    assert together.n_rows == 222
    apart = torch.cat([packed(w, dtype=dtype)(x) for w in weights], 1)
    assert apart.shape == (T, 222)
    torch.testing.assert_close(together(x), apart, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_is_added_to_every_row(dtype):
    weights = matrix("Q4_1", 70, 64)
    bias = torch.arange(70.0)
    x = inputs(3, 64).float()
    plain = packed(weights, dtype=dtype)(x)
    assert torch.equal(packed(weights, dtype=dtype, bias=bias)(x), plain + bias)


@pytest.mark.parametrize("add", [False, True])
def test_rounded_activations_give_the_same_as_the_call(add):
    """Several products and a bias, which is added once."""
    weights = [matrix("Q4_1", 70, 64), matrix("Q8_0", 30, 64)]
    product = packed(*weights, dtype=torch.bfloat16, bias=torch.arange(100.0))
    x, before = inputs(3, 64).float(), torch.randn(3, 100)
    y = before.clone()
    product.multiply(rounded(x), buffer(y), add=add)
    expected = product(x) + before if add else product(x)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("kinds", "dtype", "is_packed"),
    [
        (("Q4_1", "IQ4_XS"), torch.bfloat16, True),
        (("Q4_1", "F16"), torch.bfloat16, False),
        (("F32",), torch.bfloat16, False),
        (("Q4_1",), torch.float32, False),
    ],
)
def test_only_blocks_in_bf16_multiply_rounded_activations(kinds, dtype, is_packed):
    product = packed(*(matrix(kind, 8, 256) for kind in kinds), dtype=dtype)
    assert product.is_packed is is_packed


@pytest.mark.parametrize(
    ("kind", "dtype", "few", "many"),
    [
        ("Q4_1", torch.bfloat16, True, False),
        ("F16", torch.bfloat16, False, False),
        ("Q4_1", torch.float32, True, True),
        ("F16", torch.float32, True, True),
    ],
)
def test_sums_are_float32_for_few_packed_rows_and_in_f32(kind, dtype, few, many):
    product = packed(matrix(kind, 8, 64), dtype=dtype)
    assert product.exact_for(cpu.FEW_ROWS) is few
    assert product.exact_for(cpu.FEW_ROWS + 1) is many


def test_activations_of_another_width_are_refused_before_memory_is_read():
    product = packed(matrix("Q4_1", 8, 64), dtype=torch.bfloat16)
    with pytest.raises(KernelError):
        product(inputs(1, 96))


def test_matrices_of_different_widths_are_refused():
    with pytest.raises(ModelError, match=r"expected \[rows, 64\]"):
        PackedLinear([matrix("Q4_1", 4, 64), matrix("Q4_1", 4, 96)], dtype=torch.float32)
