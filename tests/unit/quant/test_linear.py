"""Packed products equal the decoded ones, within the bounds that the modules state."""

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4py.errors import ModelError
from ds4py.quant import linear as module
from ds4py.quant.kernels import cpu
from ds4py.quant.linear import DecodedWeights, KeepBudget, PackedLinear
from ds4py.quant.tensor import QuantTensor

EXACT_CODES = ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q8_0", "IQ4_NL")
RAW_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "Q3_K": (108,)}
# bfloat16 scales, activations and results round by up to 2^-9 each; a sum of many values stays
# well below their worst case. Formats that are rounded to 255 levels add about as much again.
PRODUCT_ERROR = dict.fromkeys(EXACT_CODES, 6e-3)
ROUNDED_ERROR = 1.2e-2


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def matrix(kind: str, rows: int, columns: int, seed: int = 0) -> QuantTensor:
    """Random weights; formats that `gguf` can not quantize to are made of random bytes."""
    rng = np.random.default_rng(seed)
    type_id = GGMLQuantizationType[kind]
    if kind in RAW_SCALES:
        values, size = GGML_QUANT_SIZES[type_id]
        raw = rng.integers(0, 256, (rows * columns // values, size), np.uint8)
        for at in RAW_SCALES[kind]:  # random exponents would make infinities
            scales = rng.uniform(1e-3, 2e-3, len(raw)).astype("<f2")
            raw[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    else:
        raw = quantize(rng.normal(0.01, 0.05, (rows, columns)).astype(np.float32), type_id)
    return QuantTensor.from_bytes(
        f"{kind}.weight", int(type_id), (rows, columns), memoryview(raw.tobytes()), "cpu"
    )


def inputs(T: int, columns: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((T, columns), generator=generator).bfloat16()


def error_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.float() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("kind", [*EXACT_CODES, "Q3_K", "Q6_K", "F16", "BF16", "F32"])
@pytest.mark.parametrize("T", [1, 3, cpu.PACKED_MAX_ROWS, cpu.PACKED_MAX_ROWS + 1])
def test_the_bf16_product_is_close_to_the_decoded_f32_product(kind, T):
    weights = matrix(kind, 100, 256)
    x = inputs(T, 256)
    y = PackedLinear([weights], dtype=torch.bfloat16)(x)
    assert y.shape == (T, 100)
    assert y.dtype is torch.bfloat16
    limit = PRODUCT_ERROR.get(kind, ROUNDED_ERROR)
    assert error_of(y, x.float() @ weights.decode().T) < limit


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(["Q4_0", "Q4_1", "Q5_1", "Q8_0"]),
    rows=st.integers(1, 200),
    groups=st.integers(1, 9),
    T=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_any_size_of_matrix_and_batch_gives_the_product(kind, rows, groups, T, seed):
    weights = matrix(kind, rows, 32 * groups, seed)
    x = inputs(T, 32 * groups, seed)
    y = PackedLinear([weights], dtype=torch.bfloat16)(x).float()
    expected = x.float() @ weights.decode().T
    # per element: rounding of every term and of the result
    scale = x.float().abs() @ weights.decode().abs().T
    assert ((y - expected).abs() <= 0.012 * scale + 1e-6).all()


@pytest.mark.parametrize("kind", EXACT_CODES)
def test_codes_and_scales_of_a_block_give_its_values(kind):
    weights = matrix(kind, 6, 512)
    part = cpu.take_apart(weights, 2, 5)
    values = (part.codes.float() * part.scale + part.zero).view(3, 512)
    torch.testing.assert_close(values, weights.decode()[2:5], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["Q3_K", "Q6_K"])
def test_other_formats_are_rounded_by_at_most_half_a_level(kind):
    weights = matrix(kind, 4, 512)
    part = cpu.take_apart(weights, 0, 4)
    expected = weights.decode().view(-1, 32)
    # factors are rounded to bfloat16, so the ends of the group may miss their level by 127 * 2^-9
    level = (expected.amax(1, keepdim=True) - expected.amin(1, keepdim=True)) / 254
    values = part.codes * part.scale + part.zero
    assert ((values - expected).abs() <= 0.8 * level).all()


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q5_1", "Q8_0"])
def test_an_all_zero_group_stays_zero(kind):
    raw = quantize(np.zeros((64, 64), np.float32), GGMLQuantizationType[kind])
    weights = QuantTensor.from_bytes(
        "z", int(GGMLQuantizationType[kind]), (64, 64), memoryview(raw.tobytes()), "cpu"
    )
    y = PackedLinear([weights], dtype=torch.bfloat16)(inputs(2, 64))
    assert torch.equal(y, torch.zeros(2, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q8_0"])
def test_the_decoded_matrix_is_code_times_rounded_scale_plus_rounded_zero(kind):
    weights = matrix(kind, 128, 256)
    part = cpu.take_apart(weights, 0, 128)
    rule = part.codes.float() * part.scale.bfloat16().float() + part.zero.bfloat16().float()
    decoded = cpu.Int4Weights(weights).decode(0, 128).T
    assert torch.equal(decoded, rule.view(128, 256).bfloat16())


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_a_row_does_not_depend_on_its_neighbours_in_the_batch(kind):
    packed = cpu.Int4Weights(matrix(kind, 128, 256))
    x = inputs(cpu.PACKED_MAX_ROWS, 256)
    together = packed(x)
    alone = torch.cat([packed(row.unsqueeze(0)) for row in x])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_both_ways_to_multiply_agree(kind):
    packed = cpu.Int4Weights(matrix(kind, 100, 256))
    x = inputs(20, 256)
    assert error_of(packed.multiply_large(x), packed.multiply_packed(x).float()) < 6e-3


def test_a_matrix_larger_than_a_piece_is_multiplied_piece_by_piece(monkeypatch):
    packed = cpu.Int4Weights(matrix("Q4_1", 200, 64))
    x = inputs(40, 64)
    whole = packed.multiply_large(x)
    monkeypatch.setattr(cpu, "_DECODE_VALUES", 64 * 64)
    assert torch.equal(packed.multiply_large(x), whole)


def test_a_matrix_is_packed_alike_in_one_step_and_in_many(monkeypatch):
    weights = matrix("Q8_0", 200, 64)
    whole = cpu.Int4Weights(weights).decode(0, 256)
    monkeypatch.setattr(cpu, "_PACK_VALUES", 1)
    assert torch.equal(cpu.Int4Weights(weights).decode(0, 256), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "Q8_0", "F16"])
def test_chosen_rows_are_the_rows_of_the_matrix(kind, dtype):
    weights = matrix(kind, 200, 64)
    index = torch.tensor([199, 0, 31, 32, 63, 64, 100, 0])
    rows = PackedLinear([weights], dtype=dtype).rows(index)
    assert rows.dtype is torch.float32
    tolerance = 0 if dtype is torch.float32 else 6e-3
    assert error_of(rows, weights.decode()[index]) <= tolerance


def test_the_packed_form_is_as_small_as_promised():
    one, two = (cpu.Int4Weights(matrix(kind, 128, 256)) for kind in ("Q4_1", "Q8_0"))
    assert one.n_bytes == 0.625 * 128 * 256
    assert two.n_bytes == 1.25 * 128 * 256


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", [("Q4_1", "Q4_1", "Q4_1"), ("Q4_1", "Q8_0", "F16")])
def test_matrices_stand_below_each_other_whatever_their_formats(kinds, dtype):
    weights = [matrix(kind, 64 + 10 * i, 64, seed=i) for i, kind in enumerate(kinds)]
    x = inputs(3, 64).to(dtype)
    together = PackedLinear(weights, dtype=dtype)
    apart = torch.cat([PackedLinear([w], dtype=dtype)(x) for w in weights], 1)
    assert apart.shape == (3, 222)
    torch.testing.assert_close(together(x), apart, rtol=1e-6, atol=1e-6)


def test_a_bias_is_added_to_every_row():
    weights = matrix("Q4_1", 70, 64)
    bias = torch.arange(70.0)
    x = inputs(3, 64).float()
    plain = PackedLinear([weights], dtype=torch.float32)(x)
    assert torch.equal(PackedLinear([weights], dtype=torch.float32, bias=bias)(x), plain + bias)


def test_matrices_of_different_widths_are_refused():
    with pytest.raises(ModelError, match=r"expected \[rows, 64\]"):
        PackedLinear([matrix("Q4_1", 4, 64), matrix("Q4_1", 4, 96)], dtype=torch.float32)


def test_without_a_known_tile_products_decode_at_each_call(monkeypatch):
    monkeypatch.setattr(cpu, "tile_rows", lambda: 0)
    weights = matrix("Q4_1", 64, 64)
    x = inputs(2, 64)
    y = PackedLinear([weights], dtype=torch.bfloat16)(x)
    assert torch.equal(y, torch.nn.functional.linear(x, weights.decode(torch.bfloat16)))
