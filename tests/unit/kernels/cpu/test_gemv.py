"""Products with packed rows, and packed rows decoded, against the decoders of the formats."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4py.errors import KernelError
from ds4py.kernels.cpu.activations import quantize
from ds4py.kernels.cpu.blocks import LAYOUTS
from ds4py.kernels.cpu.gemv import PackedRows
from ds4py.kernels.memory import KernelBuffer
from ds4py.quant.tensor import QuantTensor
from tests.unit.kernels.packed_matrices import (
    FORMS,
    WITH_SCALES,
    activation_error,
    activations,
    buffer,
    exact,
    matrix,
    multiply,
    pack,
    product_error,
    unit,
    weight_steps,
    wild_matrix,
)

WIDTH = 512
SOME = ("Q4_1", "Q4_K", "Q6_K")
"""With minima, with scales and minima, with scales."""


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def assert_multiplies(tensor: QuantTensor, x: torch.Tensor) -> None:
    error = (multiply(pack(tensor), x).double() - x.double() @ exact(tensor).T).abs()
    assert (error <= product_error(tensor, x)).all(), (error / product_error(tensor, x)).max()


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=8, deadline=None)
@given(
    make=st.sampled_from([matrix, wild_matrix]),
    n_out=st.integers(1, 40),
    n_groups=st.integers(1, 19),
    n_rows=st.integers(1, 20),
    seed=st.integers(0, 1000),
)
def test_products_are_as_exact_as_their_steps(form, make, n_out, n_groups, n_rows, seed):
    n_values = LAYOUTS[form].n_values
    width = n_values * (n_groups if n_values == 32 else 1 + n_groups % 3)
    tensor = make(form, (n_out, width), seed)
    assert_multiplies(tensor, activations(n_rows, width, seed))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n_rows", [1, 2])
def test_the_largest_sums_fit(form, n_rows):
    """All codes at one end, all activations alike: nothing cancels."""
    x = torch.ones(n_rows, WIDTH)
    for fill in (0x00, 0x7F, 0x80, 0x88, 0xFF):
        tensor = matrix(form, (3, WIDTH), factors=[1.0, -1.0])
        blocks = tensor.raw.view(-1, LAYOUTS[form].n_bytes)
        kept = [(factor.at, blocks[:, factor.at : factor.at + 2].clone()) for factor in
                LAYOUTS[form].factors]  # fmt: skip
        blocks[:] = fill
        for at, half in kept:
            blocks[:, at : at + 2] = half
        assert_multiplies(tensor, x)
        assert_multiplies(tensor, -x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [2.0**-24, 1e-7, 65504.0])
def test_rows_of_tiny_and_of_huge_factors_lose_nothing(form, size):
    tensor = matrix(form, (5, WIDTH), factors=[size, -size])
    assert_multiplies(tensor, activations(1, WIDTH))
    assert_multiplies(tensor, activations(2, WIDTH))


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_zeros_give_zeros(form):
    tensor = matrix(form, (3, WIDTH))
    tensor.raw[1] = 0
    packed = pack(tensor)
    for n_rows in (1, 3):
        y = multiply(packed, activations(n_rows, WIDTH))
        assert torch.equal(y[:, 1], torch.zeros(n_rows))
        assert (y[:, [0, 2]] != 0).all()
    assert torch.equal(packed.rows(torch.tensor([1])), torch.zeros(1, WIDTH))
    assert torch.equal(packed.decode(1, 2), torch.zeros(1, WIDTH, dtype=torch.bfloat16))


@pytest.mark.parametrize("form", FORMS)
def test_a_row_depends_on_its_batch_at_most_by_being_alone_in_it(form):
    packed, x = pack(matrix(form, (19, WIDTH))), activations(13, WIDTH)
    together = multiply(packed, x)
    for n_rows in (2, 3, 4, 5, 7, 8, 9, 11, 12):
        for start in (0, 13 - n_rows):
            part = multiply(packed, x[start : start + n_rows].contiguous())
            assert torch.equal(part, together[start : start + n_rows])
    if form not in WITH_SCALES:  # these take another way for one row
        alone = torch.cat([multiply(packed, row.unsqueeze(0)) for row in x])
        assert torch.equal(alone, together)


@pytest.mark.parametrize("form", ["Q4_1", "Q8_0"])
def test_a_row_does_not_depend_on_its_batch_where_a_chunk_is_not_full(form):
    packed, x = pack(matrix(form, (19, 288))), activations(11, 288)
    together = multiply(packed, x)
    alone = torch.cat([multiply(packed, row.unsqueeze(0)) for row in x])
    assert torch.equal(alone, together)


@pytest.mark.parametrize("form", SOME)
@pytest.mark.parametrize("n_rows", [1, 5])
def test_results_go_to_their_columns_or_are_added_there(form, n_rows):
    packed, x = pack(matrix(form, (21, WIDTH))), activations(n_rows, WIDTH)
    product = multiply(packed, x)
    before = torch.randn(n_rows, 30)
    y = before.clone()
    packed.multiply(quantize(x), buffer(y), column=4)
    assert torch.equal(y[:, 4:25], product)
    packed.multiply(quantize(x), buffer(y), column=4, add=True)
    assert torch.equal(y[:, 4:25], product + product)
    for untouched in (slice(0, 4), slice(25, 30)):
        assert torch.equal(y[:, untouched], before[:, untouched])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [matrix, wild_matrix])
def test_chosen_rows_are_as_exact_as_their_steps(form, make):
    tensor = make(form, (40, WIDTH))
    index = torch.tensor([39, 0, 17, 16, 15, 0])
    got = pack(tensor).rows(index)
    assert got.dtype is torch.float32
    limit = (weight_steps(form) + 0.01) * unit(tensor)[index]
    assert ((got.double() - exact(tensor)[index]).abs() <= limit).all()


@pytest.mark.parametrize("form", FORMS)
def test_decoded_rows_are_the_same_numbers_in_bfloat16(form):
    packed = pack(wild_matrix(form, (40, WIDTH)))
    rows = packed.rows(torch.arange(40))
    assert torch.equal(packed.decode(0, 40), rows.bfloat16())
    assert torch.equal(packed.decode(13, 31), rows[13:31].bfloat16())


@pytest.mark.parametrize("form", FORMS)
def test_products_and_decoded_rows_use_the_same_weights(form):
    """Unit vectors pick single weights; a batch of two takes the way of every larger one."""
    packed = pack(matrix(form, (33, WIDTH)))
    rows = packed.rows(torch.arange(33))
    x = torch.zeros(2, WIDTH)
    x[0, 3] = x[1, WIDTH - 1] = 1.0
    torch.testing.assert_close(multiply(packed, x), rows[:, [3, -1]].T, rtol=1e-6, atol=0)


def test_only_the_bytes_and_a_number_for_each_row_are_kept():
    for form in FORMS:
        raw = matrix(form, (40, WIDTH)).raw
        packed = PackedRows(raw, form)
        held = [value.tensor for value in vars(packed).values() if isinstance(value, KernelBuffer)]
        layout = LAYOUTS[form]
        kept = raw.nbytes // layout.n_bytes * layout.kept_bytes
        assert sum(tensor.nbytes for tensor in held) == kept + 4 * 40
        assert kept <= 1.12 * raw.nbytes
        if layout.wide is None:
            assert kept == raw.nbytes
            assert any(tensor.data_ptr() == raw.data_ptr() for tensor in held)


@pytest.mark.parametrize("form", SOME)
@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_activation_that_is_no_number_spoils_its_row_and_no_other(form, n_rows, bad):
    packed, x = pack(matrix(form, (7, WIDTH))), activations(n_rows, WIDTH)
    good = multiply(packed, x)
    for place in (0, 5, 16, WIDTH - 1):
        spoiled = x.clone()
        spoiled[0, place] = bad
        y = multiply(packed, spoiled)
        assert not y[0].isfinite().any()
        assert torch.equal(y[1:], good[1:])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_factor_that_is_no_number_spoils_its_row_and_no_other(form, bad):
    for factor in LAYOUTS[form].factors:
        tensor = matrix(form, (4, WIDTH))
        good = multiply(pack(tensor), activations(2, WIDTH))
        blocks = tensor.raw.view(4, -1, LAYOUTS[form].n_bytes)
        half = torch.tensor([bad], dtype=torch.float16).view(torch.uint8)
        blocks[1, 0, factor.at : factor.at + 2] = half
        blocks[2, -1, factor.at : factor.at + 2] = half
        packed = pack(tensor)
        for n_rows in (1, 2):
            y = multiply(packed, activations(2, WIDTH)[:n_rows].contiguous())
            assert not y[:, 1:3].isfinite().any()
        assert torch.equal(y[:, [0, 3]], good[:, [0, 3]])
        assert not packed.rows(torch.tensor([1, 2])).isfinite().any()
        assert not packed.decode(1, 3).isfinite().any()


@pytest.mark.parametrize("form", SOME)
def test_an_outlier_costs_only_its_neighbours_exactness(form):
    tensor = matrix(form, (9, 768))
    for n_rows in (1, 2):
        x = activations(n_rows, 768)
        x[:, 300] = 1e6 * x.abs().amax(1)
        assert_multiplies(tensor, x)
        x[:, 256:512] = 0
        assert_multiplies(tensor, x)


@pytest.mark.parametrize("form", SOME)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, 1e-36, 1e-31, 1e-29, 1e30])
def test_activations_of_any_size_multiply(form, size):
    tensor = matrix(form, (9, WIDTH))
    for n_rows in (1, 2):
        x = activations(n_rows, WIDTH).sign() * size
        y = multiply(pack(tensor), x).double()
        negligible = 1e-30 * exact(tensor).abs().sum(1)  # below that a chunk counts as zeros
        limit = product_error(tensor, x) + negligible
        assert ((y - x.double() @ exact(tensor).T).abs() <= limit).all()
        assert size or not y.any()


@settings(max_examples=30, deadline=None)
@given(n_rows=st.integers(1, 4), n_groups=st.integers(1, 20), seed=st.integers(0, 1000))
def test_activations_are_rounded_by_at_most_half_a_step(n_rows, n_groups, seed):
    x = activations(n_rows, 32 * n_groups, seed)
    got = quantize(x)
    scales = got.scales.double().repeat_interleave(256, 1)[:, : x.shape[1]]
    assert got.codes.abs().max() <= 16383
    assert ((got.codes * scales - x.double()).abs() <= activation_error(x)).all()
    sums = got.codes.view(n_rows, -1, 16).float().sum(2)
    assert torch.equal(got.sums, sums)


def test_memory_for_rounded_activations_can_be_used_again():
    first, second = activations(2, WIDTH, 1), activations(2, WIDTH, 2)
    memory = quantize(first)
    assert quantize(second, memory) is memory
    assert torch.equal(memory.codes, quantize(second).codes)
    assert torch.equal(memory.scales, quantize(second).scales)


@pytest.mark.parametrize("form", SOME)
def test_parts_of_a_matrix_and_rows_of_a_batch_give_the_same(form):
    raw = matrix(form, (40, WIDTH)).raw
    packed, x = PackedRows(raw, form), quantize(activations(5, WIDTH))
    whole, part = torch.empty(5, 40), torch.full((5, 17), torch.nan)
    packed.multiply(x, buffer(whole))
    some = packed.part(11, 28)
    some.multiply(x, buffer(part), rows=(1, 4))
    assert torch.equal(part[1:4], whole[1:4, 11:28])
    assert part[[0, 4]].isnan().all(), "other rows are left alone"
    with pytest.raises(KernelError, match="rows of a product"):
        some.multiply(x, buffer(part), rows=(3, 6))
    assert torch.equal(some.decode(0, 17), packed.decode(11, 28))
    assert some._raw.address == packed._raw.rows(11, 12).address
