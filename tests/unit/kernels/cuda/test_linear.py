"""The Triton kernels against the decoders: on a GPU if there is one, else in Triton's interpreter.

The interpreter runs the kernels' bodies on the CPU, program by program. It cuts results off where
the device rounds them to bfloat16, and cannot multiply bfloat16 matrices; those are the only
differences that the tests allow for.
"""

import os
from functools import partialmethod

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds4py.kernels import cuda
from ds4py.kernels.cuda import launch
from ds4py.kernels.cuda import linear as cuda_linear
from ds4py.kernels.cuda.layouts import LAYOUTS
from ds4py.layers.experts import ExpertGroups, choose, gathered, grouped, one_by_one, packed
from ds4py.quant.formats import FORMATS, QuantFormat
from ds4py.quant.tensor import QuantTensor
from tests.support.quant_blocks import HALF_OFFSETS, any_blocks, finite_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, and when a kernel is
pytest.importorskip("triton", reason="Triton is not installed: pip install 'ds4py[dev]'")

F32, BF16 = torch.float32, torch.bfloat16
NAMES = tuple(LAYOUTS)
KINDS = {kind.name: kind for kind in FORMATS.values()}
MATRIX_TYPES = [F32, BF16] if DEVICE == "cuda" else [F32]

SUM = 1e-6
"""Of the sum of all terms' magnitudes. The weights are exact, so only float32 sums in another order
differ: sixteen units in the last place, where a thread adds up some dozens of terms."""

ROUNDED = {F32: SUM, BF16: 0.012}
"""Two factors and a result of bfloat16 are rounded by 2^-9 each, in the interpreter by 2^-8."""


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def tame_blocks(kind: QuantFormat, seed: int, n_blocks: int) -> np.ndarray:
    """Random codes, and scales that make weights of about -1 to 1."""
    blocks = any_blocks(kind, seed, n_blocks)
    rng = np.random.default_rng(seed)
    for at in HALF_OFFSETS[kind.name]:
        scales = rng.uniform(1e-3, 2e-3, n_blocks).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks


def tensor(name: str, *shape: int, seed: int = 0, make=tame_blocks) -> QuantTensor:
    kind = KINDS[name]
    blocks = make(kind, seed, int(np.prod(shape)) // kind.block_values)
    return QuantTensor.from_bytes(name, kind.type_id, shape, memoryview(blocks.tobytes()), DEVICE)


def inputs(T: int, K: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    x = torch.randn((T, K), generator=torch.Generator().manual_seed(seed))
    return x.to(DEVICE, dtype)


def assert_product(y, x, weights, tolerance):
    """Compare with the product in double precision, term by term."""
    expected = x.double() @ weights.double().t()
    scale = x.double().abs() @ weights.double().abs().t()
    assert ((y.double() - expected).abs() <= tolerance * scale).all()


def columns(name: str, n_blocks: int) -> int:
    return n_blocks * KINDS[name].block_values


@pytest.mark.parametrize("name", NAMES)
def test_a_layout_covers_the_block_and_tiles_hold_whole_blocks(name):
    layout, kind = LAYOUTS[name], KINDS[name]
    assert layout.block_bytes == kind.block_bytes
    assert layout.parts * layout.lanes * layout.planes == kind.block_values
    assert kind.block_bytes % 2 == 0
    for n_warps in (1, 2, 4):
        assert launch._tile(layout, n_warps) % layout.parts == 0


@pytest.mark.parametrize("name", NAMES)
def test_decoded_values_are_the_decoders_bit_by_bit(name):
    weights = tensor(name, 3, columns(name, 5), make=finite_blocks)
    assert torch.equal(cuda.decode(weights, F32), weights.decode())


@pytest.mark.parametrize("name", NAMES)
def test_decoded_values_are_rounded_to_the_type(name):
    weights = tensor(name, 3, columns(name, 5))
    got, expected = cuda.decode(weights, BF16), weights.decode(BF16)
    if DEVICE == "cuda":
        assert torch.equal(got, expected)
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K", "IQ2_XXS"])
def test_chosen_rows_are_the_rows_of_the_matrix(name):
    weights = tensor(name, 7, columns(name, 2))
    index = torch.tensor([6, 0, 3, 0], device=DEVICE)
    rows = cuda.PackedProduct(weights, BF16).rows(index)
    assert torch.equal(rows, weights.decode()[index])


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from([F32, BF16]),
    T=st.integers(1, 9),
    N=st.integers(1, 3),
    n_blocks=st.integers(1, 9),
    seed=st.integers(0, 99),
)
@example(name="Q4_K", dtype=F32, T=4, N=2, n_blocks=33, seed=0)
@example(name="Q8_0", dtype=BF16, T=3, N=1, n_blocks=150, seed=0)
@example(name="IQ2_XXS", dtype=BF16, T=2, N=3, n_blocks=17, seed=0)
def test_few_rows_of_any_size_give_the_product(name, dtype, T, N, n_blocks, seed):
    weights = tensor(name, N, columns(name, n_blocks), seed=seed)
    x = inputs(T, weights.shape[1], dtype, seed)
    y = cuda.multiply_few(x, weights, F32)
    assert_product(y, x, weights.decode(), SUM)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("T", [1, 2, 3])
def test_every_format_gives_the_product_of_few_rows(name, T):
    weights = tensor(name, 3, columns(name, 3))
    x = inputs(T, weights.shape[1], F32)
    assert_product(cuda.multiply_few(x, weights, F32), x, weights.decode(), SUM)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("multiply", [cuda.multiply_few, cuda.multiply_many])
def test_a_token_that_is_no_number_spoils_no_other(name, multiply):
    """What a tile reads behind a token's last column, where its weights end, is the next token."""
    weights = tensor(name, 3, columns(name, 3))
    x = inputs(5, weights.shape[1], F32)
    x[1::2] = torch.nan
    y = multiply(x, weights, F32)
    assert y[1::2].isnan().all()
    assert_product(y[::2], x[::2], weights.decode(), SUM)


@pytest.mark.parametrize("n_warps", [1, 2, 4])
def test_a_row_may_be_split_among_warps(n_warps, monkeypatch):
    monkeypatch.setattr(launch, "_warps", lambda *_: n_warps)
    weights = tensor("Q4_1", 2, 4800)
    x = inputs(1, 4800, F32)
    assert_product(cuda.multiply_few(x, weights, F32), x, weights.decode(), SUM)


@pytest.mark.parametrize(
    ("n_programs", "n_parts", "expected"),
    [(1, 8, 1), (1, 9, 2), (1, 1000, 4), (8192, 1000, 1), (4096, 1000, 2), (2000, 17, 4)],
)
def test_rows_are_split_where_they_are_few_and_long(n_programs, n_parts, expected):
    assert launch._warps(n_programs, n_parts, LAYOUTS["Q8_0"]) == expected


@settings(max_examples=10, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from(MATRIX_TYPES),
    T=st.integers(1, 130),
    N=st.integers(1, 130),
    n_blocks=st.integers(1, 5),
)
@example(name="Q8_0", dtype=F32, T=65, N=65, n_blocks=3)
def test_many_rows_of_any_size_give_the_product(name, dtype, T, N, n_blocks):
    weights = tensor(name, N, columns(name, n_blocks))
    x = inputs(T, weights.shape[1], dtype)
    y = cuda.multiply_many(x, weights, dtype)
    assert_product(y, x, weights.decode(), ROUNDED[dtype])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", MATRIX_TYPES)
def test_every_format_gives_the_product_of_many_rows(name, dtype):
    weights = tensor(name, 70, columns(name, 3))
    x = inputs(20, weights.shape[1], dtype)
    assert_product(cuda.multiply_many(x, weights, dtype), x, weights.decode(), ROUNDED[dtype])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("multiply", [cuda.multiply_few, cuda.multiply_many])
def test_what_lies_in_other_rows_does_no_harm(name, multiply):
    """The last tile of a row reaches into the next one."""
    weights = tensor(name, 3, columns(name, 3))
    x = inputs(3, weights.shape[1], F32)
    x[0] = x[2] = torch.nan
    clean = multiply(x, weights, F32)
    weights.raw[0] = weights.raw[2] = 0xFF  # scales that are not numbers
    y = multiply(x, weights, F32)
    assert y[1, 1].isfinite()
    assert y[1, 1] == clean[1, 1]
    assert torch.equal(cuda.decode(weights, F32)[1], weights.decode()[1])


def test_results_have_the_type_that_was_asked_for():
    weights = tensor("Q4_0", 3, 64)
    for dtype in (F32, BF16):
        y = cuda.PackedProduct(weights, dtype)(inputs(2, 64, dtype))
        assert y.dtype is dtype
        assert_product(y, inputs(2, 64, dtype), weights.decode(), ROUNDED[dtype])


@pytest.mark.parametrize(
    ("T", "dtype", "way"),
    [
        (1, BF16, "few"),
        (16, BF16, "few"),
        (17, BF16, "fused"),
        (64, BF16, "fused"),
        (65, BF16, "decoded"),
        (16, F32, "few"),
        (17, F32, "decoded"),
    ],
)
def test_the_size_of_the_batch_chooses_the_product(T, dtype, way, monkeypatch):
    ways: list[str] = []

    def take(_self, x, name):
        ways.append(name)
        return x

    for name in ("few", "fused", "decoded"):
        monkeypatch.setattr(cuda.PackedProduct, name, partialmethod(take, name=name))
    cuda.PackedProduct(tensor("Q4_0", 3, 64), dtype)(inputs(T, 64, dtype))
    assert ways == [way]


def test_a_matrix_larger_than_a_piece_is_decoded_piece_by_piece(monkeypatch):
    weights = tensor("Q4_1", 37, 64)
    x = inputs(20, 64, F32)
    monkeypatch.setattr(cuda_linear, "_PIECE_VALUES", 20 * 64)
    y = cuda.PackedProduct(weights, F32)(x)
    torch.testing.assert_close(y, x @ weights.decode().t(), rtol=1e-6, atol=1e-6)


routings = st.integers(1, 6).flatmap(
    lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), min_size=1, max_size=6))
)
"""(experts, expert of every row); often some experts have no rows."""


@settings(max_examples=10, deadline=None)
@given(routing=routings, name=st.sampled_from(NAMES), dtype=st.sampled_from([F32, BF16]))
@example(routing=(6, [5, 5, 0]), name="IQ2_XXS", dtype=BF16)
def test_any_routing_gives_each_row_its_experts_product(routing, name, dtype):
    n_experts, routed = routing
    weights = tensor(name, n_experts, 2, columns(name, 2))
    groups = ExpertGroups(torch.tensor(routed, device=DEVICE), n_experts)
    x = inputs(len(routed), weights.shape[-1], F32)
    y = packed(x, groups, weights, dtype)
    assert y.dtype is F32
    for row, expert in enumerate(groups.experts.tolist()):
        own = slice(row, row + 1)
        assert_product(y[own], x[own], weights.decode()[expert], SUM)


@pytest.mark.parametrize(
    ("device", "dtype", "n_rows", "has_kernel", "expected"),
    [
        ("cpu", BF16, 1, True, one_by_one),
        ("cuda", BF16, 7, True, packed),
        ("cuda", BF16, 7, False, gathered),
        ("cuda", BF16, 8, True, grouped),
        ("cuda", F32, 800, True, packed),
        ("cuda", F32, 800, False, gathered),
    ],
)
def test_experts_choose_the_kernel_where_rows_are_few(
    device, dtype, n_rows, has_kernel, expected, monkeypatch
):
    monkeypatch.setattr("ds4py.layers.experts._grouped_mm", lambda *_, **__: None)
    got = choose(torch.device(device), dtype, n_rows, 8, has_kernel=has_kernel)
    assert got is expected


def test_host_memory_has_no_kernels_even_where_triton_is_installed():
    kind = KINDS["Q8_0"]
    weights = QuantTensor("w", kind, (1, 32), torch.zeros((1, 34), dtype=torch.uint8))
    assert not cuda.has_kernel(weights)
    assert cuda.product(weights, F32) is None
