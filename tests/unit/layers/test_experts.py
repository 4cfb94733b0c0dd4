"""Products of packed experts: every way to multiply against one plain reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds4py.layers import experts as module
from ds4py.layers.experts import (
    ExpertGroups,
    ExpertProduct,
    GroupedProduct,
    choose,
    gathered,
    grouped,
    one_by_one,
)
from ds4py.quant.formats import FORMATS
from ds4py.quant.tensor import QuantTensor
from tests.support.quant_blocks import HALF_OFFSETS, any_blocks

F32, BF16 = torch.float32, torch.bfloat16
PATHS: list[GroupedProduct] = [one_by_one, gathered, grouped]
NAMES = ("IQ2_XXS", "Q2_K", "Q4_K", "Q8_0", "F16", "Q4_0", "IQ3_XXS")
X, N, K = 7, 24, 512
# of the sum of all terms' magnitudes: float32 sums in another order, or two factors and a result
# that bfloat16 rounds by 2^-9 each, with the result alone when the rows are few
TOLERANCE = {F32: 2e-6, BF16: 0.012}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that hold a part of an expert on the CPU, and two experts elsewhere."""
    monkeypatch.setattr(module, "_CPU_PIECE_VALUES", 10 * K)
    monkeypatch.setattr(module, "_DEVICE_PIECE_VALUES", 2 * N * K)


def tensor(name: str, n_experts: int = X, rows: int = N, seed: int = 0) -> QuantTensor:
    """Random weights between about -1 and 1."""
    kind = next(kind for kind in FORMATS.values() if kind.name == name)
    blocks = any_blocks(kind, seed, n_experts * rows * K // kind.block_values)
    rng = np.random.default_rng(seed)
    for at in HALF_OFFSETS[name]:
        scales = rng.uniform(1e-3, 2e-3, len(blocks)) * (500 if name == "F16" else 1)
        blocks[:, at : at + 2] = scales.astype("<f2").view(np.uint8).reshape(-1, 2)
    data = memoryview(blocks.tobytes())
    return QuantTensor.from_bytes(name, kind.type_id, (n_experts, rows, K), data, "cpu")


def inputs(M: int, seed: int = 1) -> torch.Tensor:
    return torch.randn((M, K), generator=torch.Generator().manual_seed(seed))


def assert_close(
    product: GroupedProduct, dtype: torch.dtype, weights: QuantTensor, routed: list[int]
) -> None:
    groups = ExpertGroups(torch.tensor(routed), weights.shape[0])
    x = inputs(len(routed))
    y = torch.empty((len(routed), weights.shape[1]))
    y[groups.order] = product(x[groups.order], groups, weights, dtype)
    matrices = weights.decode().double()[torch.tensor(routed)]
    expected = (matrices @ x.double().unsqueeze(2)).squeeze(2)
    scale = (matrices.abs() @ x.double().abs().unsqueeze(2)).squeeze(2)
    assert ((y - expected).abs() <= TOLERANCE[dtype] * scale).all()


routings = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.one_of(
            st.lists(st.integers(0, n - 1), min_size=1, max_size=300),
            st.tuples(st.integers(0, n - 1), st.integers(1, 300)).map(lambda p: [p[0]] * p[1]),
        ),
    )
)
"""(experts, expert of every row); often some experts have no rows, sometimes one has them all."""


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("product", PATHS)
@settings(max_examples=25, deadline=None)
@given(routing=routings, name=st.sampled_from(NAMES), room=st.integers(1, 5 * 8 * K))
@example(routing=(12, [11] * 300), name="IQ2_XXS", room=2 * 8 * K)
@example(routing=(12, [0] * 300), name="Q2_K", room=2 * 8 * K)
@example(routing=(1, [0]), name="Q8_0", room=1)
def test_any_routing_gives_the_product(product, dtype, routing, name, room):
    n_experts, routed = routing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CPU_PIECE_VALUES", room)
        patch.setattr(module, "_DEVICE_PIECE_VALUES", room)
        assert_close(product, dtype, tensor(name, n_experts, rows=8), routed)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("product", PATHS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_every_format_gives_the_product_with_pieces_of_the_real_size(name, product, dtype):
    assert_close(product, dtype, tensor(name), [3, 0, 6, 6, 6, 0, 6, 6])


@pytest.mark.parametrize("M", [1, 3])
def test_few_rows_of_an_expert_are_exact_on_the_cpu_in_any_precision(M):
    weights = tensor("IQ2_XXS")
    groups = ExpertGroups(torch.full((M,), 2), X)
    y = one_by_one(inputs(M), groups, weights, BF16)
    assert torch.equal(y, inputs(M) @ weights.decode()[2].t())


@pytest.mark.parametrize("product", PATHS)
def test_what_lies_in_experts_without_rows_does_no_harm(product, small_pieces):
    """Infinite and NaN scales, as they would come out of bytes that nobody may read."""
    weights = tensor("Q8_0")
    for unused in (0, 2, 3, 4, 6):
        weights.expert(unused).raw.fill_(0xFF)
    groups = ExpertGroups(torch.tensor([1, 5, 1, 1, 1]), X)
    assert product(inputs(5)[groups.order], groups, weights, BF16).isfinite().all()


def counting(weights: QuantTensor) -> tuple[QuantTensor, list[int]]:
    """Return the same weights, and a list that gets the number of values of every decoding."""
    decoded: list[int] = []

    def decode(blocks: torch.Tensor) -> torch.Tensor:
        values = weights.format.decode(blocks)
        decoded.append(values.numel())
        return values

    return replace(weights, format=replace(weights.format, decode=decode)), decoded


@pytest.mark.parametrize(
    ("product", "matrices", "largest"),
    [(one_by_one, 2, 10 * K), (gathered, 5, 2 * N * K), (grouped, X, 2 * N * K)],
)
def test_only_what_a_product_needs_is_decoded_in_bounded_pieces(
    product: GroupedProduct, matrices: int, largest: int, small_pieces: None
) -> None:
    """Two experts have rows, five rows in all."""
    weights, decoded = counting(tensor("Q2_K"))
    groups = ExpertGroups(torch.tensor([1, 5, 1, 1, 1]), X)
    product(inputs(5), groups, weights, BF16)
    assert sum(decoded) == matrices * N * K
    assert max(decoded) == largest


def test_small_experts_are_decoded_together_on_the_cpu(monkeypatch):
    monkeypatch.setattr(module, "_CPU_PIECE_VALUES", 3 * N * K)
    weights, decoded = counting(tensor("Q2_K"))
    one_by_one(inputs(5), ExpertGroups(torch.tensor([0, 1, 3, 4, 6]), X), weights, F32)
    assert decoded == [3 * N * K, 2 * N * K]


@settings(max_examples=50, deadline=None)
@given(routing=routings)
def test_groups_keep_the_order_of_the_rows_of_an_expert(routing):
    n_experts, routed = routing
    groups = ExpertGroups(torch.tensor(routed), n_experts)
    order = groups.order.tolist()
    assert order == sorted(range(len(routed)), key=lambda row: (routed[row], row))
    covered = [(expert, row) for expert, start, end in groups.present for row in order[start:end]]
    assert covered == [(routed[row], row) for row in order]


@pytest.mark.parametrize(
    ("device", "dtype", "M", "expected"),
    [
        ("cpu", F32, 1, one_by_one),
        ("cpu", BF16, 10_000, one_by_one),
        ("cuda", BF16, X - 1, gathered),
        ("cuda", BF16, X, grouped),
        ("cuda", F32, 10_000, gathered),
    ],
)
def test_device_precision_and_rows_choose_the_product(device, dtype, M, expected):
    assert choose(torch.device(device), dtype, M, X) is expected


def test_a_torch_without_grouped_products_gathers(monkeypatch):
    monkeypatch.setattr(module, "_grouped_mm", None)
    assert choose(torch.device("cuda"), BF16, 10_000, X) is gathered


@pytest.fixture(params=NAMES)
def abstract(request: pytest.FixtureRequest) -> QuantTensor:
    """Weights without data: whatever would make the host wait for a value fails."""
    weights = tensor(request.param)
    return replace(weights, raw=weights.raw.to("meta"))


@pytest.mark.parametrize("M", [1, X - 1, X, 300])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_no_product_of_an_accelerator_asks_for_a_value(abstract, M, dtype, small_pieces):
    groups = ExpertGroups(torch.empty(M, dtype=torch.int64, device="meta"), X)
    y = ExpertProduct(abstract, dtype)(torch.empty((M, K), device="meta"), groups)
    assert (y.shape, y.dtype, y.device.type) == ((M, N), F32, "meta")


def test_the_product_of_the_cpu_does(abstract):
    """A test of the test above."""
    groups = ExpertGroups(torch.empty(3, dtype=torch.int64, device="meta"), X)
    with pytest.raises(NotImplementedError, match="meta"):
        one_by_one(torch.empty((3, K), device="meta"), groups, abstract, F32)


@pytest.mark.cuda
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("M", [1, X - 1, X, 300])
def test_cuda_gives_the_product_without_waiting(name, dtype, M):
    weights = tensor(name)
    routed = torch.arange(M) * 5 % X
    there = replace(weights, raw=weights.raw.cuda())
    x, on_device = inputs(M).cuda(), routed.cuda()
    ExpertProduct(there, dtype)(x, ExpertGroups(on_device, X))  # first-use tables
    torch.cuda.set_sync_debug_mode("error")
    try:
        groups = ExpertGroups(on_device, X)
        y = ExpertProduct(there, dtype)(x[groups.order], groups)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    here = ExpertGroups(routed, X)
    expected = one_by_one(inputs(M)[here.order], here, weights, F32)
    error = (y.cpu() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype is F32 else 6e-3)
