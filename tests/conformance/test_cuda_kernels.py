"""The Triton kernels on a GPU, at the sizes of real models, against the decoders.

`tests/unit/kernels/cuda/test_linear.py` covers odd sizes, on a GPU too. Here stand the properties
that only a device has: large offsets, streams that nobody waits for, graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from ds4py.kernels import cuda
from ds4py.kernels.cuda.layouts import LAYOUTS
from ds4py.layers.experts import ExpertGroups, ExpertProduct
from ds4py.quant.formats import FORMATS
from ds4py.quant.tensor import QuantTensor
from tests.support.quant_blocks import HALF_OFFSETS, any_blocks

pytestmark = pytest.mark.cuda

CUDA = torch.device("cuda", 0)
F32, BF16 = torch.float32, torch.bfloat16
NAMES = tuple(LAYOUTS)
N, K = 1536, 4096

TOLERANCE = {F32: 1e-6, BF16: 0.006}
"""Of the sum of all terms' magnitudes: float32 sums in another order, or weight and result rounded
to bfloat16 by 2^-9 each (the inputs are compared as they were given)."""


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def tensor(name: str, *shape: int, seed: int = 0) -> QuantTensor:
    """Random blocks whose weights lie between about -1 and 1."""
    kind = next(kind for kind in FORMATS.values() if kind.name == name)
    blocks = any_blocks(kind, seed, int(np.prod(shape)) // kind.block_values)
    rng = np.random.default_rng(seed)
    for at in HALF_OFFSETS[name]:
        scales = rng.uniform(1e-3, 2e-3, len(blocks)).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return QuantTensor.from_bytes(name, kind.type_id, shape, memoryview(blocks.tobytes()), CUDA)


def inputs(T: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn((T, K), generator=torch.Generator().manual_seed(1)).to(CUDA, dtype)


def assert_product(
    y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
) -> None:
    expected = x.double() @ weights.double().t()
    scale = x.double().abs() @ weights.double().abs().t()
    assert ((y.double() - expected).abs() <= TOLERANCE[dtype] * scale).all()


@contextmanager
def nobody_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("way", ["few", "fused", "decoded"])
@pytest.mark.parametrize("T", [1, 5, 16, 50, 130])
def test_every_way_to_multiply_gives_the_product(
    name: str, dtype: torch.dtype, way: str, T: int
) -> None:
    weights = tensor(name, N, K)
    product = cuda.product(weights, dtype)
    assert product is not None
    x = inputs(T, dtype)
    y = getattr(product, way)(x)
    assert y.dtype is dtype
    assert_product(y, x, weights.decode(), dtype)


@pytest.mark.parametrize("name", NAMES)
def test_decoded_values_are_the_decoders_bit_by_bit(name: str) -> None:
    weights = tensor(name, N, K)
    for dtype in (F32, BF16):
        assert torch.equal(cuda.decode(weights, dtype), weights.decode(dtype))


def test_formats_without_a_kernel_have_no_product() -> None:
    assert cuda.product(tensor("IQ3_XXS", 8, K), BF16) is None


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("M", [6, 400])
def test_experts_beyond_two_gigabytes_are_found(dtype: torch.dtype, M: int) -> None:
    own = tensor("Q8_0", 2, N, K)
    X = (1 << 31) // (own.n_bytes // 2) + 3
    raw = torch.zeros((X * N, own.raw.shape[1]), dtype=torch.uint8, device=CUDA)
    raw[-2 * N :] = own.raw
    weights = QuantTensor("many", own.format, (X, N, K), raw)
    routed = torch.arange(M, device=CUDA) % 2 + X - 2
    groups = ExpertGroups(routed, X)
    x = inputs(M)
    y = ExpertProduct(weights, dtype)(x, groups)
    matrices = own.decode()
    for number in (0, 1):
        chosen = groups.experts == X - 2 + number
        assert_product(y[chosen], x[chosen], matrices[number], BF16 if M > X else F32)


@pytest.mark.parametrize("T", [1, 4, 16, 40])
def test_a_captured_product_follows_its_input(T: int) -> None:
    weights = tensor("Q4_K", N, K)
    product = cuda.PackedProduct(weights, BF16)
    x = inputs(T, BF16)
    product(x)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = product(x)
    x.neg_()
    graph.replay()
    assert_product(y, x, weights.decode(), BF16)


@pytest.mark.parametrize("T", [1, 16, 40, 130])
def test_nobody_waits_for_the_device(T: int) -> None:
    weights, experts = tensor("IQ2_XXS", N, K), tensor("IQ2_XXS", 8, 64, K)
    product, routed = cuda.PackedProduct(weights, BF16), ExpertProduct(experts, BF16)
    x, index = inputs(T, BF16), torch.arange(T, device=CUDA) % 8

    def once() -> torch.Tensor:
        product.rows(index)
        routed(x.float(), ExpertGroups(index, 8))
        return product(x)

    once()  # compiles, and uploads the codebook
    with nobody_waits():
        y = once()
    assert y.isfinite().all()
